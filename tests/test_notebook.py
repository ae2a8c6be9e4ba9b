"""The notebooks run from a clean kernel, and what is stored in them is what a run shows."""

import re
from pathlib import Path

import nbformat
from nbclient import NotebookClient

EXAMPLES = Path(__file__).parents[1] / "examples"
ROW = r"(\| ([\w ]+) \| (\w+) \| ([\d.]+%) \|)"


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


def test_the_training_notebook_runs_in_short_and_its_stored_run_was_a_whole_one():
    notebook = nbformat.read(EXAMPLES / "convert_and_train.ipynb", as_version=4)
    stored = "".join(output.get("text", "") for output in outputs(notebook))
    assert {output.output_type for output in outputs(notebook)} == {"stream", "execute_result"}
    exact = {row[2]: float(row[3].rstrip("%")) for row in re.findall(ROW, stored) if row[1] == "trained"}
    assert exact["low_confidence"] >= 85 and exact["self_speculative"] >= 85
    assert "causal logits equal" in stored and int(re.search(r"(\d+) minutes in all", stored)[1]) < 20

    short = {"steps, count = 600, 100": "steps, count = 2, 1", '"train", 6000': '"train", 24'}
    for whole, part in short.items():
        (cell,) = [cell for cell in notebook.cells if whole in cell.source]
        cell.source = cell.source.replace(whole, part)
    folder = {"metadata": {"path": str(EXAMPLES)}}
    NotebookClient(notebook, timeout=300, kernel_name="python3", resources=folder).execute()
    shown = "".join(output.get("text", "") for output in outputs(notebook))
    assert "causal logits equal" in shown and "minutes in all" in shown
    assert [row[1:3] for row in re.findall(ROW, shown)][-1] == ("trained", "self_speculative")
