"""Test the check of flags, metrics, log lines, names and defaults: what vLLM does not have is found,
and what our own code has is not asked for.
"""

import functools

import pytest
import vllm_facts as tool
import vllm_names as names

PAGE = "lessons/04_batching.md"
SOURCES = {
    "vllm/engine/arg_utils.py": """
class EngineArgs:
    max_num_seqs: int | None = None
    max_loras: int = LoRAConfig.max_loras
    seats: Seats = get_field(LoRAConfig, "seats")
    enable_prefix_caching: bool = True
    def get_batch_defaults(self, world_size: int = 3):
        if big:
            self.budget = 16384
        budget = 8192
        self.budget: int = 2048
        return {"vllm": budget, "on": True}
""",
    "vllm/config/lora.py": """
class LoRAConfig:
    max_loras: int = Field(default=1, ge=1)
    seats: Seats = field(default_factory=Seats)
    kept: ClassVar[int] = 4
""",
    "vllm/envs.py": "if TYPE_CHECKING:\n    VLLM_INTERVAL: float = 10.0\nLEVELS = {'two': {'mode': Mode.FULL}}\n",
    "vllm/v1/metrics/loggers.py": """
PARTS = ["Running: %d reqs", "%s KV cache usage: %.1f%%"]
NUM = Counter(name="vllm:spec_decode_num_drafts"), Counter(name="vllm:spec_decode_num_draft_tokens")
log(f"Graphs of {sizes} took {gib:.2f} GiB, which "
    "is a lot: lower max_graph_size")
parser.add_argument("--dry-run")
""",
}


def claims(text: str, name: str = PAGE, **others: str):
    texts = {name: f"Of vLLM.\n\n{text}"} | others
    passages = [each for path in texts for each in names.passages(path, texts[path])]
    return tool.claims(texts, passages, tool.Ledger())


def problems(text: str, ledger=None, **others: str) -> list[str]:
    """Return the problems of a text, looked up in `SOURCES`."""
    ledger = ledger or tool.Ledger()
    claimed = claims(text, **others)
    facts = tool.facts_of(claimed, SOURCES, ledger)
    return tool.problems(claimed, facts, ledger, {"a.py": "parser.add_argument('--ours')"} | others, "9.8.7")


@functools.cache
def committed():
    return names.read_list(names.LIST.read_text())


def test_all_that_our_texts_say_is_in_the_committed_list():
    texts, source = names.our_texts(), committed()
    assert {kind: len(source.facts[kind]) >= least for kind, least in LEAST.items()} == dict.fromkeys(LEAST, True)
    assert tool.problems(names.fact_claims(texts), source.facts, names.ledger(), texts, names.VERSION) == []
    assert tool.unstated(texts, names.all_passages(texts), names.ledger()) == []


LEAST = {"flags": 40, "metrics": 20, "logs": 25, "names": 400, "defaults": 70, "parameters": 360}


@pytest.mark.parametrize(
    "text",
    [
        "Set `--max-num-seqs 4`, `--no-enable-prefix-caching`, `--dry-run` or `--ours`.",
        "```bash\nvllm serve MODEL --max-num-seqs 4\n```",
        "`vllm:spec_decode_num_drafts_total` and `_num_draft_tokens`",
        "## On call\n\n```text\n…, Running: 31 reqs, GPU KV cache usage: 62.0%\n```",
        '## On call\n\nIt says "Graphs of [1, 2] took 0.61 GiB", "Graphs … is a lot".',
        "It has `get_batch_defaults`.",
        "Ours has `KEPT_HERE`.",
    ],
)
def test_what_vllm_or_our_code_has_is_right(text: str):
    assert problems(text, **{"vllm/minivllm/a.py": "KEPT_HERE = 1"}) == []


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("Set `--max-num-seq 4`.", "flag --max-num-seq"),
        ("```bash\nvllm serve MODEL --max-seqs 4\n```", "flag --max-seqs"),
        ("```bash\nvllm serve MODEL --dry-run '{\"max_number\": 1}'\n```", "name max_number"),
        ("`vllm:spec_decode_num_draft`", "metric vllm:spec_decode_num_draft"),
        ("`vllm:spec_decode_num_drafts`, `_num_drafted_tokens`", "metric vllm:spec_decode_num_drafted_tokens"),
        ("## On call\n\n```text\nRunning: 31 requests, GPU KV cache usage: 62.0%\n```", "log Running: # requests"),
        ('## On call\n\nIt says "Graphs … is too much".', "log Graphs … is too much"),
        ("It has `get_batch_default`.", "name get_batch_default"),
    ],
)
def test_a_misspelt_one_is_found(text: str, wrong: str):
    (problem,) = problems(text)
    assert problem.endswith(f"vLLM 9.8.7 has no {wrong}")
    assert problem.startswith(f"{PAGE}:")


@pytest.mark.parametrize(
    ("path", "name", "value"),
    [
        ("vllm/engine/arg_utils.py", "EngineArgs.max_num_seqs", "None"),
        ("vllm/engine/arg_utils.py", "EngineArgs.max_loras", "1"),
        ("vllm/engine/arg_utils.py", "EngineArgs.seats", "Seats"),
        ("vllm/engine/arg_utils.py", "EngineArgs.get_batch_defaults", "3 16384 8192 2048"),
        ("vllm/engine/arg_utils.py", "EngineArgs.get_batch_defaults.budget", "16384, then 8192, then 2048"),
        ("vllm/engine/arg_utils.py", "EngineArgs.get_batch_defaults.world_size", "3"),
        ("vllm/envs.py", "VLLM_INTERVAL", "10.0"),
        ("vllm/envs.py", "LEVELS.two.mode", "Mode.FULL"),
        ("vllm/envs.py", "LEVELS.three.mode", None),
        ("vllm/engine/arg_utils.py", "EngineArgs.max_num_seq", None),
        ("vllm/nowhere.py", "EngineArgs", None),
    ],
)
def test_a_default_is_found_by_its_name(path: str, name: str, value: str | None):
    assert tool.value_of(SOURCES, path, name) == value


LEDGER = """
gone = ["--dry-run", "--swap-space"]
foreign = []
apart = ["the default had moved"]

[[default]]
path = "vllm/config/lora.py"
name = "LoRAConfig.max_loras"
value = "{value}"
said = ["one slot by default"]
"""


def test_a_default_that_the_ledger_has_otherwise_is_found_and_so_is_a_flag_that_is_back():
    wrong = problems("", tool.read_ledger(LEDGER.format(value="2")))
    assert wrong == [
        "vllm_facts.toml: vllm/config/lora.py LoRAConfig.max_loras is 1 in vLLM 9.8.7, not 2",
        "vllm_facts.toml: vLLM 9.8.7 has --dry-run, which our texts call gone",
    ]


def test_a_default_that_the_ledger_lacks_is_found_and_so_is_one_that_no_text_states():
    ledger = tool.read_ledger(LEDGER.format(value="1"))

    def unstated(text: str) -> list[str]:
        texts = {PAGE: f"Of vLLM.\n\n{text}"}
        return tool.unstated(texts, list(names.passages(PAGE, texts[PAGE])), ledger)

    assert unstated("Then the default had moved. It has one slot by default.") == []
    assert unstated("Then the default had moved. One slot is the default.") == [
        f"{PAGE}:3: vllm_facts.toml does not have this default: One slot is the default.",
        "vllm_facts.toml: no text says 'one slot by default'",
    ]


def test_the_arguments_of_our_engine_and_server_have_vllms_defaults_but_for_these():
    theirs = committed().facts["defaults"]
    ours = {name: value for name, value in tool.our_arguments().items() if f"argument {name}" in theirs}
    assert len(ours) > 40
    assert {name for name, value in ours.items() if value != theirs[f"argument {name}"]} == {
        *("model", "block_size", "enable_prefix_caching", "enable_chunked_prefill"),  # None is resolved later there
        *("api_key", "lora_modules", "served_model_name"),  # None, and an empty list here
        "shutdown_timeout",  # 0 and 0.0
    }


def test_signatures_are_read_from_the_source():
    listed = {"vllm/a.py": {"A": {}, "A.f": {}, "B": {}, "A.inherited": {}, "A.g": {}}}
    source = """
class Base:
    def inherited(self, x): ...
class A(Base):
    a: int
    b: int = 3
    c: ClassVar[int] = 4
    @overload
    def f(self, p): ...
    def f(self, p, q=None, *, r: int = 1, s=Other()): ...
class B:
    def __init__(self, n): ...
"""
    assert tool.signatures(listed, {"vllm/a.py": source}) == {
        "vllm/a.py": {
            "A": {"a": "required", "b": {"default": 3}},
            "A.f": {"p": "required", "q": {"default": None}, "r": {"default": 1}, "s": {}},
            "B": {"n": "required"},
            "A.inherited": {"x": "required"},
            "A.g": {},
        }
    }


def test_the_list_holds_the_facts():
    claimed = claims("`--dry-run`, `vllm:spec_decode_num_drafts`, `get_batch_defaults`")
    facts = tool.facts_of(claimed, SOURCES, tool.Ledger())
    again = tool.read_facts(tool.written(facts))
    assert {kind: again[kind] for kind in ("flags", "metrics", "names")} == {
        "flags": {"--dry-run": "vllm/v1/metrics/loggers.py"},
        "metrics": {"vllm:spec_decode_num_drafts": "vllm/v1/metrics/loggers.py"},
        "names": {"get_batch_defaults": "vllm/engine/arg_utils.py"},
    }
