"""Stands in for `sgl_kernel`, whose CPU build is on no package registry, so that stock SGLang can be imported.

It registers no operators: SGLang then finds no AMX backend and every layer takes its plain torch path. Any name can be
imported from here; calling one raises, so nothing is computed by a stand-in.
"""


def __getattr__(name: str):
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*arguments, **options):
        raise NotImplementedError(f"sgl_kernel.{name} was called, but this is only a stand-in for the import")

    missing.__name__ = name
    return missing
