import pathlib
p=pathlib.Path("tests/test_examples.py"); s=p.read_text()
s=s.replace('''@pytest.mark.slow
def test_the_first_example_of''','''@pytest.mark.slow
def test_the_accelerate_example_trains_within_the_budget_of_the_environment(tmp_path: Path, monkeypatch) -> None:
    pytest.importorskip("transformers", reason="the extra `models` is not installed")
    monkeypatch.setenv("HIREMATE_BUDGET", "60%")

    printed = run(str(ROOT / "examples" / "accelerate_lm.py"), "--steps", "5", "--layers", "2", cwd=tmp_path)

    assert printed.count("loss") == 5
    assert "(60%)" in printed
    assert "measured: peak" in printed


@pytest.mark.slow
def test_the_first_example_of''',1)
p.write_text(s)
p=pathlib.Path("README.md"); s=p.read_text()
s=s.replace('''A budget is a number of bytes''','''With Accelerate, in place of `accelerator.prepare`, see [examples/accelerate_lm.py](examples/accelerate_lm.py); `HIREMATE_BUDGET` in the
environment sets the budget where the script names none:

```python
from hiremate_lightning.integrations.accelerate import prepare_hiremate

model, optimizer, loader = prepare_hiremate(accelerator, model, optimizer, loader, budget="10 GiB")
```

As a backend of torch.compile, with nothing to import:

```python
model = torch.compile(model, backend="hiremate", options={"budget": "10 GiB"})
```

A budget is a number of bytes''',1)
p.write_text(s)
p=pathlib.Path("CHANGELOG.md"); s=p.read_text()
s=s.replace("- Trained inside a budget by `torch.compile","- Trained inside a budget with Accelerate by `prepare_hiremate` in place of `accelerator.prepare`; `HIREMATE_BUDGET` sets the budget.\n- Trained inside a budget by `torch.compile",1)
p.write_text(s)
