"""The bug museum: engines built on demand with one defect each, which you find from its symptoms
(`make bugs`).

- `exhibits`: the collection, read from `lessons/bugs/exhibits.toml`.
- `workloads`: what each engine is run on, and what is observed; as a script it runs in a process of
  its own.
- `copies`: an engine with its defect, written to `out/bugs`; the record of solved exhibits.
- `desk`: the commands.
"""
