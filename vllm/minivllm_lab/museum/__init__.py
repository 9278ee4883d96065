"""The bug museum: engines with one defect each, built in on demand, to be found from their symptoms
(`make bugs`).

- `exhibits`: the collection, read from `lessons/bugs/exhibits.toml`.
- `workloads`: what each engine is given to do, and what is looked at.
- `runner`: runs workloads on one engine, in a process of its own.
- `copies`: an engine with its defect, written to `out/bugs`; what has been solved.
- `desk`: the commands.
"""
