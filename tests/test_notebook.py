"""The notebook runs from a clean kernel, and what is stored in it is what a run shows."""

from pathlib import Path

import nbformat
from nbclient import NotebookClient

EXAMPLES = Path(__file__).parents[1] / "examples"


def outputs(notebook) -> list[dict]:
    return [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]


def test_the_notebook_runs_from_a_clean_kernel_and_its_stored_outputs_are_in_order():
    notebook = nbformat.read(EXAMPLES / "first_steps.ipynb", as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert {(output.output_type, output.get("name")) for output in outputs(notebook)} == {("stream", "stdout")}
    stored = "".join(output.text for output in outputs(notebook))
    folder = {"metadata": {"path": str(EXAMPLES)}}
    NotebookClient(notebook, timeout=120, kernel_name="python3", resources=folder).execute()  # raises what a cell does
    shown = "".join(output.text for output in outputs(notebook) if output.get("name") == "stdout")
    for text in (stored, shown):
        assert '{"name":"Mona","city":"Kyoto","age":55}' in text
        assert "same text: True" in text
