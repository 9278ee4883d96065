"""Lesson 06: its servers do what the text says, its kernel is right, its exercise catches
mistakes.
"""

import asyncio
import re
import subprocess
import time
from itertools import pairwise

import pytest
import torch
from kernels.harness import assert_compiles
from lessons.harness import REPOSITORY, exercise_test, figures_of_quick_run, script_path
from patience import PATIENCE
from warm_processes import WarmSubprocess

from minivllm import LLM, SamplingParams
from minivllm.config import EMBEDDED_MODEL, NO_PARTS
from minivllm.outputs import CompletionOutput, RequestOutput
from minivllm_lab.exercise import load, plug_of
from minivllm_lab.followed import PROMPT, followed
from minivllm_lab.serving import report, timelines
from minivllm_lab.serving.core_places import CoreInLoop
from minivllm_lab.serving.processes import processes
from minivllm_lab.serving.request_trace import HOPS
from minivllm_lab.serving.stage import Stage

lesson = load(script_path("06"))
TEXT = (REPOSITORY / "lessons" / "06_serving.md").read_text()

# ---- the text ------------------------------------------------------------------------------------


def test_the_collector_by_hand():
    """The client reads after the first, the fourth and the fifth output, as in the text's table."""
    pieces = [token.text for token in followed("alone").request.output][:5]
    assert pieces == [" a", " +", " b", "\n", "\n"]

    async def read() -> list[str]:
        collector, result = lesson.RequestOutputCollector(), []
        for step, piece in enumerate(pieces, start=1):
            collector.put(RequestOutput("add", None, [], None, [CompletionOutput(0, piece, [step])], finished=False))
            if step in (1, 4, 5):
                result.append((await collector.get()).outputs[0].text)
        return result

    run = asyncio.run(read())
    assert run == [" a", " + b\n", "\n"]
    for text in run:
        assert f"reads `{text!r}`".replace("'", '"') in TEXT


def test_stop_strings_by_hand():
    """The text's table shows what is sent and held back of the followed request, with a stop string
    that occurs.
    """
    pieces = [token.text for token in followed("alone").request.output][2:]
    stops = lesson.StopStrings(["\n\ndef"])
    seen = [(*stops.push(piece), stops.held) for piece in pieces]
    assert seen == [(" b", None, ""), ("", None, "\n"), ("", None, "\n\n"), ("", "\n\ndef", "")]
    other = lesson.StopStrings(["\n\nclass"])
    assert [other.push(piece)[0] for piece in pieces] == [" b", "", "", "\n\ndef"]


def test_the_picture_of_the_loop_shows_what_the_cell_prints():
    for blocked, name in ((False, "sleep"), (True, "blocks")):
        seconds = "  ".join(str(tenths / 10) for tenths in timelines.ticks(blocked))
        assert f"\n{seconds}  {name}\n" in TEXT


def test_the_others_wait_for_the_tunnel_on_the_naive_server_only():
    gaps = [max(later - at for at, later in pairwise(timelines.turns(stops))) for stops in (True, False)]
    start, end = timelines.TUNNEL
    assert gaps == [end - start + 1, 1]


@pytest.mark.parametrize(("tp", "dp", "total"), [(4, 1, 6), (1, 4, 13)])
def test_processes_are_counted_as_vllm_counts_them(tp, dp, total):
    """Each engine has an API server and a core, each GPU a worker, and several engines a coordinator."""
    drawn = processes(tp, dp)
    assert f">-{'tp' if tp > 1 else 'dp'} 4: {total} processes<" in drawn
    assert len(re.findall(r">(?:server \d|core \d|worker \d|coordinator)<", drawn)) == total
    assert "`-tp 4`: 6; `-dp 4`: 13;" in TEXT


def test_no_answer_of_the_exercise_stands_before_it():
    before = TEXT.partition("## Build it")[0]
    assert "async def until_disconnected" not in before
    assert "@triton.jit" not in before
    assert not re.search(r"class (RequestOutputCollector|StopStrings)", before)


# ---- the servers ---------------------------------------------------------------------------------

SETTINGS = {"model": str(EMBEDDED_MODEL), "device": "cpu", "num_gpu_blocks_override": 100, "max_model_len": 256}


def test_the_server_says_what_the_engine_says_and_forgets_who_leaves():
    """One server, on real sockets, sends a request's whole text with and without a stop string;
    then a client leaves.
    """
    whole = LLM(**SETTINGS).generate(
        PROMPT, SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True), use_tqdm=False
    )
    text = whole[0].outputs[0].text
    core = CoreInLoop(SETTINGS)
    with Stage() as stage:
        server = lesson.Server(core, str(EMBEDDED_MODEL))
        port = stage.serve(server, core)
        assert texts_of(port, {"prompt": PROMPT, "max_tokens": 24}) == text
        stopped = texts_of(port, {"prompt": PROMPT, "max_tokens": 24, "stop": ["\n\ndef"]})
        assert stopped == text[: text.index("\n\ndef")]
        assert report.held(core.core) == 0, "a stop string ends the request in the core too"
        leaving = report.RawClient(port, {"prompt": PROMPT, "max_tokens": 200})
        leaving.read_events(2)
        leaving.socket.close()
        end = time.monotonic() + PATIENCE
        while report.held(core.core) and time.monotonic() < end:
            time.sleep(0.005)
        assert report.held(core.core) == 0
        assert server.streams.readers == {}
        assert server.unread < 5, "it went on computing"


class DyingCore:
    """A core that fails at its first step with an unexpected exception."""

    async def open(self):
        pass

    def send(self, act, argument):
        self.asked = True

    async def get_output(self):
        while not hasattr(self, "asked"):
            await asyncio.sleep(0.001)
        raise TypeError("no such field")

    def close(self):
        pass


def test_no_client_waits_for_a_core_that_has_failed():
    """Whatever ended the core, the stream ends without an event."""
    core = DyingCore()
    with Stage() as stage:
        port = stage.serve(lesson.Server(core, str(EMBEDDED_MODEL)), core)
        client = report.RawClient(port, {"prompt": PROMPT, "max_tokens": 24})
        client.socket.settimeout(PATIENCE)
        assert client.read_events() == 0
        client.socket.close()


def texts_of(port, body):
    """Return the texts of all events of a request, joined."""
    client = report.RawClient(port, body)
    answer = b""
    while part := client.socket.recv(1 << 16):
        answer += part
    client.socket.close()
    return "".join(report.json.loads(event)["text"] for event in answer.decode().split("data: ")[1:])


# ---- the kernel ----------------------------------------------------------------------------------


@pytest.mark.parametrize("vocabulary", [1, 31, 32, 1025])
def test_the_kernel_masks_what_is_not_allowed(vocabulary, device):
    torch.manual_seed(vocabulary)
    allowed, logits = torch.rand(4, vocabulary) < 0.5, torch.randn(4, vocabulary)
    has_grammar = torch.tensor([1, 0, 1, 1], dtype=torch.int32)
    allowed[3] = False
    masked = logits.to(device)
    report.apply_mask(
        lesson.apply_grammar_bitmask_kernel, masked, report.as_bitmask(allowed).to(device), has_grammar.to(device)
    )
    right = logits.masked_fill(~allowed & has_grammar.bool()[:, None], -torch.inf)
    assert torch.equal(masked.cpu(), right)


def test_the_kernel_compiles():
    integers = torch.zeros(4, 4, dtype=torch.int32)
    arguments = {
        "logits": torch.zeros(4, 128), "bitmask": integers, "has_grammar": integers[0],
        "vocab_size": 128, "num_words": 4, "BLOCK": 32,
    }  # fmt: skip
    assert_compiles(lesson.apply_grammar_bitmask_kernel, arguments)


def test_bits_are_where_they_should_be():
    assert report.as_bitmask(torch.tensor([[True, False, True]])).tolist() == [[5]]
    assert report.as_bitmask(torch.arange(33)[None] >= 31).tolist() == [[-(2**31), 1]]


# ---- the exercise --------------------------------------------------------------------------------

MISTAKES = {
    ("RequestOutputCollector.put", "join(self.unread, output)"): {
        "keeps only the last delta": "self.unread = output",
        "drops what comes while something is unread": "pass",
        "joins the other way round": "join(output, self.unread)\nself.unread = output",
        "keeps what it has joined": "join(self.unread, output)\nself.joined = [*getattr(self, 'joined', []), output]",
    },
    ("RequestOutputCollector.put", "self.there.set()"): {
        "does not wake the reader": "",
        "wakes the reader only at the end": (
            "if not isinstance(output, Exception) and output.finished: self.there.set()"
        ),
    },
    ("RequestOutputCollector.get", "output, self.unread = self.unread, None"): {
        "forgets that something is read": "output = self.unread"
    },
    ("RequestOutputCollector.get", "if self.error is None: ..."): {
        "does not clear the event": "",
        "clears after a turn of the loop": "await asyncio.sleep(0)\nif self.error is None: self.there.clear()",
    },
    ("RequestOutputCollector.get", "await self.there.wait()"): {
        "clears before it waits: a lost wake-up": "self.there.clear()\nawait self.there.wait()",
        "asks again and again": "while self.unread is None and self.error is None: await asyncio.sleep(0)",
        "asks a hundred times a second": (
            "while self.unread is None and self.error is None: await asyncio.sleep(0.01)"
        ),
        "looks once a second": "while self.unread is None and self.error is None: await asyncio.sleep(1)",
        "spins without await": "while self.unread is None and self.error is None: pass",
        "returns None where nothing has come": "",
        "swallows the cancelling of a reader": "try: await self.there.wait()\nexcept asyncio.CancelledError: pass",
    },
    ("RequestOutputCollector.get", "await self.there.wait()\noutput, self.unread = self.unread, None"): {
        "takes before it waits": (
            "output, self.unread = self.unread, None\nawait self.there.wait()\noutput = output or self.unread"
        ),
        "holds what a cancelled reader was given": (
            "output = None\n"
            "while output is None and self.error is None:\n"
            "    output, self.unread = self.unread, None\n"
            "    self.there.clear()\n"
            "    await asyncio.sleep(0) if output else await self.there.wait()"
        ),
    },
    ("RequestOutputCollector.get", "raise self.error"): {
        "returns the error": "return self.error",
        "tells the error once": "error, self.error = self.error, None\nraise error",
        "another error than was put": "raise type(self.error)('the engine has died')",
    },
    ("RequestOutputCollector.put", "self.error = output"): {
        "an error overtakes the data": "self.error, self.unread = output, None"
    },
    ("RequestOutputCollector.put", "if self.error is not None: ..."): {"data after an error": ""},
    ("RequestOutputCollector.__init__", "self.there = asyncio.Event()"): {
        "one event for all requests": "type(self).there = asyncio.Event()"
    },
    ("RequestOutputCollector.put", "isinstance(output, Exception)"): {
        "knows one kind of error": "isinstance(output, ConnectionError)"
    },
    ("join", "unread.outputs.append(completion)"): {
        "two completions at the most": "if len(unread.outputs) < 2: unread.outputs.append(completion)",
        "drops a completion that is new": "pass",
    },
    ("join", "earlier.token_ids += completion.token_ids"): {
        "each token once": (
            "earlier.token_ids += [one for one in completion.token_ids if one not in earlier.token_ids]"
        ),
        "loses the tokens": "",
    },
    ("join", "earlier.text += completion.text"): {
        "the last 64 letters": "earlier.text = (earlier.text + completion.text)[-64:]",
        "loses the text": "",
    },
    ("join", "if completion.logprobs is not None: ..."): {
        "loses the log probabilities": "",
        "makes log probabilities that nobody asked for": (
            "earlier.logprobs = (earlier.logprobs or []) + (completion.logprobs or [])"
        ),
    },
    ("join", "earlier.finish_reason, earlier.stop_reason = completion.finish_reason, completion.stop_reason"): {
        "loses how it ended": "",
        "loses what stopped it": "earlier.finish_reason = completion.finish_reason",
    },
    ("join", "unread.finished = new.finished"): {
        "loses `finished`": "",
        "finished with the first completion": "unread.finished = any(one.finish_reason for one in unread.outputs)",
    },
    ("StopStrings.__init__", "self.stop, self.held = stop, ''"): {
        "at most four stop strings": "self.stop, self.held = stop[:4], ''",
        "without blanks around them": "self.stop, self.held = [one.strip() or one for one in stop], ''",
        "three stop strings at the most": "self.stop, self.held = stop[:3], ''",
    },
    ("StopStrings.push", "self.held + text_delta"): {
        "drops carriage returns": "self.held + text_delta.replace('\\r', '')",
        "looks at 4,096 characters of a piece": "(self.held + text_delta)[:4096]",
        "looks at each piece alone": "text_delta",
    },
    ("join", "known = ..."): {
        "joins by place": "known = {one.index: mine for one, mine in zip(new.outputs, unread.outputs)}",
        "lists completions one after the other": "known = {}",
    },
    ("StopStrings.push", "max(..., default=0)"): {
        "holds nothing back": "0",
        "always holds the longest less one": "min(len(text), max((len(one) - 1 for one in self.stop), default=0))",
        "holds one character": "min(1, max(..., default=0))",
        "holds eight characters at the most": "min(8, max(..., default=0))",
    },
    ("StopStrings.push", "(overlap(text, one) for one in self.stop)"): {
        "holds back for the first string only": "(overlap(text, one) for one in self.stop[:1])"
    },
    ("StopStrings.push", "max((overlap(text, one) for one in self.stop), default=0)"): {
        "holds the least of them": "min((overlap(text, one) for one in self.stop), default=0)"
    },
    ("StopStrings.push", "self.held = text[...:]"): {"forgets what it holds": "self.held = ''"},
    ("StopStrings.push", "return text[: len(text) - kept], None"): {"sends what it holds": "return text, None"},
    ("StopStrings.push", "text[: end - len(stopped)]"): {"sends the stop string too": "text[:end]"},
    ("StopStrings.push", "return text[: end - len(stopped)], stopped"): {
        "sends nothing of the last piece": "return '', stopped"
    },
    ("StopStrings.push", "min(found)"): {
        "the first of the list wins": "min(found, key=lambda one: one[1])",
        "the first to begin wins": "min(found, key=lambda one: (one[0] - len(one[2]), one[1]))",
        "the last listed of two that end at once": "min(found, key=lambda one: (one[0], -one[1]))",
    },
    ("StopStrings.push", "text.find(one)"): {"the last one in the text": "text.rfind(one)"},
    ("StopStrings.push", "found = ..."): {
        "stop strings are patterns": (
            "import re\n"
            "found = [(re.search(one, text).end(), i, one) for i, one in enumerate(self.stop) if re.search(one, text)]"
        ),
        "capitals do not count": (
            "low = text.lower()\n"
            "found = [(low.find(s.lower()) + len(s), i, s) for i, s in enumerate(self.stop) if s.lower() in low]"
        ),
    },
    ("StopStrings.flush", "return held"): {"forgets the end": "return ''"},
    ("StopStrings.flush", "held, self.held = self.held, ''"): {"gives the end twice": "held = self.held"},
    ("overlap", "text.endswith(stop[:size])"): {"holds a false start for ever": "stop[:size] in text"},
    ("overlap", "range(min(len(text), len(stop) - 1), 0, -1)"): {
        "the shortest end that may begin one": "range(1, min(len(text), len(stop) - 1) + 1)"
    },
    ("until_disconnected", "asyncio.FIRST_COMPLETED"): {"goes on for a client that has left": "asyncio.ALL_COMPLETED"},
    ("until_disconnected", "await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)"): {
        "watches nobody": "await asyncio.wait({working})",
        "swallows its own cancelling": (
            "try: await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)\n"
            "except asyncio.CancelledError: pass"
        ),
        "looks ten times a second": "while not (working.done() or leaving.done()): await asyncio.sleep(0.1)",
    },
    ("until_disconnected", "working.cancel()\nleaving.cancel()"): {
        "does not cancel the work": "leaving.cancel()",
        "cancels a second time": "working.cancel()\nleaving.cancel()\nawait asyncio.sleep(0)\nworking.cancel()",
    },
    (
        "until_disconnected",
        "working.cancel()\nleaving.cancel()\nawait asyncio.gather(working, leaving, return_exceptions=True)",
    ): {"leaves the watcher running": "working.cancel()\nawait asyncio.gather(working, return_exceptions=True)"},
    ("until_disconnected", "await asyncio.gather(working, leaving, return_exceptions=True)"): {
        "does not wait for the abort": "await asyncio.sleep(0)",
        "waits a second for the abort": "await asyncio.sleep(1)",
        "does not wait for the watcher": "await asyncio.gather(working, return_exceptions=True)",
        "swallows its cancelling while it waits for the abort": (
            "try: await asyncio.gather(working, leaving, return_exceptions=True)\nexcept asyncio.CancelledError: pass"
        ),
    },
    ("until_disconnected", "working.result() if working.done() else None"): {
        "an empty answer is none": "(working.result() or None) if working.done() else None"
    },
    ("until_disconnected", "return working.result() if working.done() else None"): {
        "loses the work's error": "return working.result() if working.done() and not working.exception() else None",
        "raises when the client has left": "return working.result()",
        "a socket that breaks is an error": "return working.result() if working.done() else leaving.result()",
    },
    ("until_disconnected", "asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)"): {
        "a minute at the most": "asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED, timeout=60)"
    },
    ("until_disconnected", "try: ...\nfinally: ..."): {
        "cleans up only if all is well": (
            "await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)\n"
            "working.cancel()\nleaving.cancel()\n"
            "found = working.result() if working.done() else None\n"
            "await asyncio.gather(working, leaving, return_exceptions=True)\n"
            "return found"
        ),
    },
    ("mask_words_kernel", "allowed == 0"): {"the other way round": "allowed != 0"},
    ("mask_words_kernel", "(tl.load(bitmask + word) >> bit) & 1"): {
        "bit 31 is never set": "((tl.load(bitmask + word) & (1 << bit)) > 0).to(tl.int32)"
    },
    ("mask_words_kernel", "tl.load(bitmask + word) >> bit"): {
        "the highest bit first": "tl.load(bitmask + word) >> (31 - bit)"
    },
    ("mask_words_kernel", 'tl.store(logits + word * 32 + bit, float("-inf"), mask=allowed == 0)'): {
        "multiplies by the bit": (
            "tl.store(logits + word * 32 + bit, tl.load(logits + word * 32 + bit) - 1e30 * (1 - allowed))"
        )
    },
    ("mask_words_kernel", 'float("-inf")'): {"a large number is not infinity": "-10000.0"},
    ("mask_rows_kernel", "(allowed == 0) & (token < vocab_size)"): {"beyond the vocabulary": "allowed == 0"},
    ("mask_rows_kernel", "row * vocab_size"): {"rows of whole words": "row * tl.num_programs(1) * 32"},
    ("mask_rows_kernel", "row, word = tl.program_id(0), tl.program_id(1)"): {
        "rows and words the other way round": "word, row = tl.program_id(0), tl.program_id(1)"
    },
    ("mask_rows_kernel", "bitmask + row * tl.num_programs(1) + word"): {
        "one row's mask for all": "bitmask + word",
        "words by the vocabulary": "bitmask + row * (vocab_size // 32) + word",
    },
    ("apply_grammar_bitmask_kernel", "tl.load(has_grammar + row) != 0"): {
        "all rows have a grammar": "row >= 0",
        "a grammar is a 1": "tl.load(has_grammar + row) == 1",
    },
    ("apply_grammar_bitmask_kernel", "tl.load(bitmask + row * num_words + word, mask=word < num_words, other=0)"): {
        "reads the words of every row": (
            "tl.load(bitmask + tl.minimum(row * num_words + word, 1000000), mask=word < num_words + 1, other=0)"
        ),
        "words beyond the row": "tl.load(bitmask + row * num_words + word)",
    },
    ("apply_grammar_bitmask_kernel", "tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)"): {
        "only the first words": "tl.arange(0, BLOCK)"
    },
    ("apply_grammar_bitmask_kernel", "(allowed == 0) & (token < vocab_size)"): {
        "tokens beyond the row": "allowed == 0"
    },
}
"""For (function, its code): what it is replaced by, under the name of the mistake."""
MUTANTS = {mistake: (*where, instead) for where, mistakes in MISTAKES.items() for mistake, instead in mistakes.items()}

MESSAGES = {
    "keeps only the last delta": "only the last one is left",
    "joins the other way round": "the order is lost",
    "does not wake the reader": "was a wake-up lost?",
    "clears before it waits: a lost wake-up": "was a wake-up lost?",
    "asks again and again": "does it check again and again",
    "asks a hundred times a second": "does it ask in a loop?",
    "looks once a second": "put must wake it",
    "spins without await": "does a loop in it never end?",
    "returns the error": "in place of raising it",
    "an error overtakes the data": "the exception overtook a",
    "loses the log probabilities": "four tokens, and log probabilities of",
    "loses how it ended": "finish_reason is None",
    "keeps what it has joined": "join each when it comes",
    "stop strings are patterns": "no pattern",
    "looks ten times a second": "do not look from time to time",
    "a grammar is a 1": "which is not 0",
    "joins by place": "Are they joined by their place in the list?",
    "always holds the longest less one": "you always keep the length of the longest one",
    "forgets the end": "is it forgotten?",
    "the first of the list wins": "not the one that begins first, nor the first of the list",
    "looks at each piece alone": "end in the third one after it",
    "does not cancel the work": "Was `work` cancelled?",
    "does not wait for the abort": "still under way when until_disconnected returns",
    "does not wait for the watcher": "`disconnected` still runs",
    "cancels a second time": "a second cancel() has cut it off",
    "swallows its own cancelling": "Is CancelledError caught?",
    "leaves the watcher running": "`disconnected` still runs",
    "the other way round": "It is the other way round",
    "bit 31 is never set": "Bit 31 makes the word negative",
    "rows of whole words": "Is a token or a word not masked that is not there?",
    "rows and words the other way round": "which of the two program ids is the row?",
    "all rows have a grammar": "a row without a grammar was written",
}

test_the_checks_catch = exercise_test("06", MUTANTS, MESSAGES)


def test_the_server_runs_with_the_learners_parts():
    """The answers and the number of aborted requests are the same, and a slow reader gets few
    events.
    """
    plugged = plug_of("06")(lesson)
    yours, ours = (plugged.serve(plugged, parts) for parts in (plugged.parts, NO_PARTS))
    assert (yours.texts, yours.token_ids) == (ours.texts, ours.token_ids)
    assert list(yours.equal.values()) == list(ours.equal.values()) == [5, 1, 2, "200 of 200"]
    assert all(events < 150 for item in (yours, ours) for events in item.rows.values()), "unread outputs were joined"


# ---- the script from outside ---------------------------------------------------------------------


@pytest.fixture
def warm_cores(template, warm_processes, tmp_path, monkeypatch):
    """Fork the script's own core process too, as the real server's is."""
    start, code = subprocess.Popen, tmp_path / "core.py"

    def start_warm(command, **options):
        if template is None or command[1] != "-c":
            return start(command, **options)
        code.write_text(command[2])
        command = [command[0], str(code), *command[3:]]
        return WarmSubprocess(template).Popen(command, stdin=subprocess.DEVNULL, pass_fds=options["pass_fds"])

    monkeypatch.setattr(subprocess, "Popen", start_warm)


@pytest.mark.usefixtures("warm_cores")
def test_quick_run(tmp_path):
    figures = figures_of_quick_run("06", tmp_path)
    at = figures["trace"]["at_ms"]
    assert list(at)[1:-1] == list(HOPS), "every hop is passed"
    assert sorted(at.values()) == list(at.values()), "in this order"
    assert 0 < figures["trace"]["server_ttft_ms"] < figures["trace"]["ttft_ms"]
    slow, left = figures["slow"]["servers"], figures["left"]
    still = 1000 * figures["slow"]["unread_seconds"]
    assert slow["naive"]["longest_gap_ms"] > 0.9 * still, "all wait, though a client may read its last event late"
    assert slow["naive"]["events"] > 380, "one for each token, but for a few that a busy machine reads together"
    assert slow["this lesson's"]["events"] < slow["naive"]["events"], "what was not read was merged"
    assert left["naive"]["in_vain"] > 0.8 * 6 * 197
    assert left["this lesson's"]["in_vain"] < left["naive"]["in_vain"] / 4
    assert left["naive"]["most_blocks"] > left["this lesson's"]["most_blocks"]
    for clients, figure in figures["load"]["closed"].items():
        assert figure["little"] <= 1.01 * int(clients), "no more can be inside than ask"
    ways = figures["ways"]["ways"]
    assert ways["TP"]["alone_ms"] < ways["DP"]["alone_ms"] < ways["PP"]["alone_ms"]
    assert ways["TP"]["sent_64"] > 50 * ways["PP"]["sent_64"] > 0
