"""Run the lessons: what they share, and a folder for each. Importing it does not import torch.

The top level is what every script imports: flags (`cli`), first and last steps (`lesson`), tables,
progress, proofs, timing, results; and the commands of a reader (`exercise`, `notebook`,
`calculator`, `capstone`). The rooms:

- `pictures`, `checks`, `engines`: what several lessons share, by subject.
- `museum`, `predict`, `workload`: a command each, and a page.
- `kv_cache` to `multi_lora`: what one lesson alone needs.
"""
