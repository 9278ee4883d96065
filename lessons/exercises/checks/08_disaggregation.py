"""Check the part of exercise 08 that needs nothing but Python: a page runs these checks, too."""

import random

from minivllm.core.request import Request, RequestStatus

BLOCK_SIZE, LEASE = 4, 30.0
ADDRESS = {"remote_host": "10.0.0.1", "remote_port": 5601}


# ---- requests and connectors -----------------------------------------------------------------------------------------


class Clock:
    """Shows the time that it is set to, and starts between two seconds, as clocks do."""

    def __init__(self):
        self.now = self.start = 100.625

    def __call__(self):
        return self.now


def connector_of(module, clock=None):
    """Return the learner's connector, with blocks of four tokens."""
    return module.ConnectorScheduler(BLOCK_SIZE, dict(ADDRESS), LEASE, clock or Clock())


def request_of(name, num_tokens, params=None, first=0, block_size=BLOCK_SIZE):
    """Make a request with `num_tokens` tokens, counted up from `first`: equal `first` means equal beginnings."""
    request = Request(name, list(range(first, first + num_tokens)), max_tokens=8, kv_transfer_params=params)
    request.enable_block_hashes(block_size)
    return request


def from_elsewhere(num_tokens, name="p", first_block=50):
    """Return the params that a prefiller gives for a prompt of this length."""
    blocks = list(range(first_block, first_block + -(-num_tokens // BLOCK_SIZE)))
    told = {"do_remote_prefill": True, "do_remote_decode": False, "remote_block_ids": blocks}
    return {**told, "remote_request_id": name, "remote_num_tokens": num_tokens, **ADDRESS}


def remote(name, num_tokens, first=0, first_block=50):
    """Make a request whose prompt was computed by another engine."""
    return request_of(name, num_tokens, from_elsewhere(num_tokens, f"p-{name}", first_block), first)


def admitted(connector, request, num_local=0, block_ids=None):
    """Admit a request as the scheduler does: ask, allocate, tell. Return the answer."""
    answer = connector.get_num_new_matched_tokens(request, num_local)
    if answer[0] is not None:
        table = block_ids or list(range(10, 10 + -(-request.num_tokens // BLOCK_SIZE) + 1))
        allocated(connector, request, table, answer[0])
        request.num_computed_tokens = num_local + answer[0]
    return answer


def allocated(connector, request, table, num_external_tokens):
    """Give the request this block table; neither may be changed."""
    given, its = list(table), list((request.kv_transfer_params or {}).get("remote_block_ids", ()))
    connector.update_state_after_alloc(request, given, num_external_tokens)
    after = list((request.kv_transfer_params or {}).get("remote_block_ids", its))
    assert given == table, f"the block table {table} has become {given}: it is the scheduler's"
    assert after == its, f"remote_block_ids {its} have become {after}: the params go with the read"


def ended(connector, request, block_ids=(), status=RequestStatus.FINISHED_LENGTH_CAPPED, computed=None):
    """End the request; return what the connector answers."""
    request.status = status
    request.num_computed_tokens = request.num_tokens if computed is None else computed
    given = list(block_ids)
    said = connector.request_finished(request, given)
    assert given == list(block_ids), f"the block table {list(block_ids)} has become {given}: it is the scheduler's"
    assert isinstance(said, tuple) and len(said) == 2, f"request_finished returns {said!r}, not a pair"
    return said


def assert_answer(found, expected, where, hint=""):
    """Check the answer of `get_num_new_matched_tokens`."""
    assert isinstance(found, tuple) and len(found) == 2, f"{where}: it returns {found!r}, not a pair"
    assert found == expected, f"{where}: {found}, and {expected} is right{hint}"
    assert isinstance(found[1], bool), f"{where}: the second is {found[1]!r}, not a bool"


def reads_of(connector):
    """Return the reads as plain data: (request, our blocks, the peer's, the peer's id of the request)."""
    reads = connector.build_connector_meta()
    assert isinstance(reads, list), f"build_connector_meta returns {type(reads).__name__}, not a list"
    return [
        (one.request_id, list(one.block_ids), list(one.remote_block_ids), one.params["remote_request_id"])
        for one in reads
    ]


# ---- the three answers -----------------------------------------------------------------------------------------------


def check_nothing_to_be_had(module):
    """A request whose prompt no other engine has computed gets (0, False)."""
    for params in (None, {}, {"do_remote_prefill": False}, {"do_remote_decode": True, "do_remote_prefill": False}):
        connector, request = connector_of(module), request_of("r", 10, params)
        found = connector.get_num_new_matched_tokens(request, 0)
        assert_answer(found, (0, False), f"kv_transfer_params {params}")
    used = from_elsewhere(10) | {"do_remote_prefill": False}
    assert_answer(
        connector_of(module).get_num_new_matched_tokens(request_of("r", 10, used), 0),
        (0, False),
        "do_remote_prefill is False, the other keys are there",
    )


def check_how_many_tokens_come(module):
    """Tokens computed here need not come; if nothing is missing, the answer is (0, False); asking changes nothing."""
    for num_tokens, num_local in ((10, 0), (10, 4), (10, 8), (8, 0), (8, 4), (1, 0), (3, 0), (13, 12)):
        connector, request = connector_of(module), remote("r", num_tokens)
        for again in ("", ", asked again"):
            hint = ""
            found = connector.get_num_new_matched_tokens(request, num_local)
            computed = request.num_computed_tokens
            assert computed == 0, f"asking changes nothing, and num_computed_tokens of the request is now {computed}"
            if isinstance(found, tuple) and found[0] == num_tokens - 1 - num_local:
                hint = ": the last token too; that it is computed again is the scheduler's affair"
            if isinstance(found, tuple) and found[0] == num_tokens and num_local:
                hint = ": what is computed here need not come"
            where = f"the peer has {num_tokens} tokens, {num_local} are here{again}"
            assert_answer(found, (num_tokens - num_local, True), where, hint)
        assert not reads_of(connector), "asking is not yet reading: the blocks are not there yet"
    found = connector_of(module).get_num_new_matched_tokens(remote("r", 8), 8)
    assert_answer(found, (0, False), "the peer has 8 tokens, 8 are here")
    for num_local, right in ((0, (10, True)), (8, (2, True)), (12, (0, False))):
        longer = request_of("r", 14, from_elsewhere(10, "p-r"))
        found = connector_of(module).get_num_new_matched_tokens(longer, num_local)
        assert_answer(found, right, f"the prompt has 14 tokens, the peer 10 of them, {num_local} are here")


def check_on_its_way_for_another(module):
    """While the next missing block is being read for another request: (None, False); then a number again."""
    connector = connector_of(module)
    admitted(connector, remote("first", 14))
    cases = (("the same prompt", 14, 0), ("the same beginning", 30, 0), ("8 are here, and block 2 is missing", 14, 8))
    for said, num_tokens, num_local in cases:
        again = connector.get_num_new_matched_tokens(remote("again", num_tokens), num_local)
        assert_answer(again, (None, False), f"{said}, being read for another")
    others = (
        ("another prompt", remote("other", 14, first=100), 0, 14),
        ("all that is in flight is here already", remote("longer", 30), 12, 18),
        ("what is missing has no hash, and is nobody else's", remote("tail", 15), 12, 3),
    )
    for said, request, num_local, right in others:
        assert_answer(connector.get_num_new_matched_tokens(request, num_local), (right, True), said)
    asked = connector.get_num_new_matched_tokens(request_of("plain", 14), 0)
    assert_answer(asked, (0, False), "the same prompt, but it is to be computed here")
    connector.update_connector_output(set(), {"first", "unknown"})
    hint = ": `first` has received its blocks, or failed to"
    assert_answer(connector.get_num_new_matched_tokens(remote("again", 14), 8), (6, True), "afterwards", hint)


def check_only_what_is_read_is_in_flight(module):
    """Blocks that were here before are not in flight, nor are those of a request that reads nothing."""
    connector = connector_of(module)
    admitted(connector, remote("first", 14), num_local=8)
    found = connector.get_num_new_matched_tokens(remote("again", 14), 0)
    assert_answer(
        found, (14, True), "another request reads block 2, and block 0 is missing", ": ask only about that one"
    )
    connector = connector_of(module)
    admitted(connector, request_of("longer", 22, from_elsewhere(10, "p-longer")))
    found = connector.get_num_new_matched_tokens(remote("again", 22), 12)
    said = "the peer has 10 of another request's 22 tokens, and block 3 is missing"
    assert_answer(found, (10, True), said, ": what the peer does not have is not being read")
    found = connector.get_num_new_matched_tokens(remote("again", 22), 8)
    said = "the peer has 10 of another request's 22 tokens, so 2 of block 2's 4, and block 2 is missing"
    assert_answer(found, (14, True), said, ": that read fills a part of the block, which its hash does not name")
    connector = connector_of(module)
    admitted(connector, request_of("computed here", 14))
    found = connector.get_num_new_matched_tokens(remote("again", 14), 0)
    assert_answer(found, (14, True), "the same prompt is being computed here, not read")


# ---- which blocks ----------------------------------------------------------------------------------------------------


def check_blocks_to_be_filled(module):
    """A read lists the missing blocks, ours beside the peer's, and none of the room for the answer."""
    cases = (
        (10, 10, 0, [5, 2, 8, 6], [5, 2, 8], [50, 51, 52]),
        (10, 10, 4, [5, 2, 8, 6], [2, 8], [51, 52]),
        (10, 10, 8, [5, 2, 8], [8], [52]),
        (8, 8, 0, [3, 1, 7, 9], [3, 1], [50, 51]),
        (8, 8, 4, [3, 1], [1], [51]),
        (1, 1, 0, [4, 6, 7], [4], [50]),
        (21, 10, 4, [5, 2, 8, 6, 4, 9], [2, 8], [51, 52]),
    )
    for num_tokens, of_peer, num_local, table, mine, its in cases:
        connector = connector_of(module)
        admitted(connector, request_of("r", num_tokens, from_elsewhere(of_peer, "p-r")), num_local, table)
        reads = reads_of(connector)
        where = f"{num_tokens} tokens, the peer has {of_peer} of them, {num_local} here, block table {table}"
        assert len(reads) == 1, f"{where}: {len(reads)} reads, and one is right"
        name, block_ids, remote_ids, peers = reads[0]
        assert (name, peers) == ("r", "p-r"), f"{where}: the read is of {name!r}, with the params of {peers!r}"
        said = f"{where}: our blocks {block_ids} from {remote_ids}"
        assert len(block_ids) == len(remote_ids), f"{said}: not one for one"
        assert (block_ids, remote_ids) == (mine, its), f"{said}, and {mine} from {its} is right"


def check_reads_are_handed_over_once(module):
    """`build_connector_meta` gives the reads since the last call, in order, and requests without params have none."""
    connector = connector_of(module)
    admitted(connector, remote("a", 6))
    admitted(connector, request_of("plain", 6))
    admitted(connector, request_of("for others", 6, {"do_remote_decode": True}))
    allocated(connector, remote("hit", 8, first=300), [3, 1, 7], 0)
    admitted(connector, remote("b", 6, first=100))
    reads = connector.build_connector_meta()
    names = [one.request_id for one in reads]
    assert names == ["a", "hit", "b"], f"reads of {names}, and of ['a', 'hit', 'b'] is right"
    assert reads_of(connector) == [], "what was handed over once is handed over again"
    assert len(reads) == 3, "the list that was handed over is emptied afterwards; hand over a list of its own"
    admitted(connector, remote("c", 6, first=200))
    assert [one[0] for one in reads_of(connector)] == ["c"]


def check_a_prompt_is_read_once(module):
    """After a preemption the request is admitted again: its prompt is then computed here, not read again."""
    connector, request = connector_of(module), remote("r", 10)
    admitted(connector, request)
    assert len(reads_of(connector)) == 1, "the first time it is read"
    connector.update_connector_output(set(), {"r"})
    answer = connector.get_num_new_matched_tokens(request, 0)
    assert_answer(answer, (0, False), "the same request again, after a preemption", "; the peer has freed its blocks")
    connector.update_state_after_alloc(request, [1, 2, 3], 0)
    assert reads_of(connector) == [], "it is read again, and the peer has freed its blocks"


def check_the_peer_is_told_in_any_case(module):
    """If all is here already, or the request ends before it is read, the read has no blocks: it only tells the peer."""
    connector = connector_of(module)
    hit = remote("hit", 8)
    allocated(connector, hit, [3, 1, 7], 0)
    told = "0 external tokens: the peer holds its blocks until it is told; one read without blocks is right"
    assert reads_of(connector) == [("hit", [], [], "p-hit")], told
    assert_answer(
        connector.get_num_new_matched_tokens(remote("next", 8), 0), (8, True), "a read without blocks is none"
    )
    ended(connector, hit, [3, 1, 7])
    assert reads_of(connector) == [], "all was here, and the peer was told so; it is told again when the request ends"
    for status in (RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_ERROR):
        gone = remote("gone", 8)
        said = ended(connector, gone, (), status, computed=0)
        assert said == (False, None), f"it ended before its prompt was read: {said}, and (False, None) is right"
        assert reads_of(connector) == [("gone", [], [], "p-gone")], "it ended unread: the peer must be told"
    done = remote("done", 8)
    admitted(connector, done)
    reads_of(connector)
    assert ended(connector, done, [1, 2]) == (False, None), "nobody will read a decoder's blocks"
    assert reads_of(connector) == [], "its prompt was read: the peer knows, and need not be told again"
    left = remote("left", 8, first=300)
    admitted(connector, left)
    reads_of(connector)
    ended(connector, left, [1, 2], RequestStatus.FINISHED_ABORTED)
    assert reads_of(connector) == [], "it is being read; if the peer is told now, it frees what is still on its way"


# ---- blocks that are held --------------------------------------------------------------------------------------------


def check_blocks_are_held_for_the_reader(module):
    """A request for another engine keeps its blocks, and its client gets all that the other engine needs."""
    long = list(range(400, 0, -1))
    for num_tokens, table, right in (
        (10, [7, 3, 9], [7, 3, 9]),
        (8, [4, 2, 6], [4, 2]),
        (1, [5, 8], [5]),
        (BLOCK_SIZE * 399, long, long[:399]),
    ):
        request = request_of("r", num_tokens, {"do_remote_decode": True, "do_remote_prefill": False})
        held, params = ended(connector_of(module), request, table)
        where = f"{num_tokens} tokens computed, block table {table}"
        assert held is True, f"{where}: the blocks are not held, and freed before anybody has read them"
        assert isinstance(params, dict), f"{where}: the client is told {params!r}, and a dictionary is right"
        expected = {
            "do_remote_prefill": True,
            "remote_request_id": "r",
            "remote_num_tokens": num_tokens,
            "remote_block_ids": right,
            **ADDRESS,
        }
        for key, value in expected.items():
            found = params.get(key, "missing")
            assert found == value, f"{where}: {key} is {found!r}, and {value!r} is right"
        assert not params.get("do_remote_decode"), "do_remote_decode would make the other engine hold its blocks, too"


def check_each_reader_is_told_its_own(module):
    """The last sampled token is not computed, and the params of one client do not change afterwards."""
    connector = connector_of(module)
    one, other = (request_of(name, 8, {"do_remote_decode": True}) for name in ("one", "other"))
    one.append_output_token_id(5)
    _, first = ended(connector, one, [4, 2, 6], computed=8)
    assert first is not None, "its blocks are not held"
    said = (first["remote_num_tokens"], first["remote_block_ids"])
    assert said == (8, [4, 2]), f"8 tokens computed, a ninth sampled: told {said}, and (8, [4, 2]) is right"
    answered = request_of("answered", 8, {"do_remote_decode": True})
    for token in (5, 6, 7):
        answered.append_output_token_id(token)
    _, longer = ended(connector, answered, [4, 2, 6], computed=10)
    said = longer and (longer["remote_num_tokens"], longer["remote_block_ids"])
    assert said == (10, [4, 2, 6]), (
        f"8 tokens of a prompt and 2 of its answer computed: told {said}, and (10, [4, 2, 6]) is right"
    )
    ended(connector, other, [1, 3], computed=8)
    kept = first["remote_request_id"], first["remote_block_ids"]
    assert kept == ("one", [4, 2]), f"what the first client was told has become {kept}: one dictionary for all"


def check_other_settings(module):
    """Block size, address and lease are those that the connector was made with."""
    clock, address = Clock(), {"remote_host": "10.0.0.9", "remote_port": 7}
    connector = module.ConnectorScheduler(3, address, 5.0, clock)
    held, params = ended(connector, request_of("r", 8, {"do_remote_decode": True}, 0, 3), [7, 3, 9, 4])
    assert held is True and params is not None, "its blocks are not held"
    told = {name: params.get(name) for name in ("remote_host", "remote_port", "remote_block_ids")}
    right = {**address, "remote_block_ids": [7, 3, 9]}
    assert told == right, f"blocks of 3 tokens, another address: told {told}, and {right} is right"
    clock.now += 5.0
    assert connector.expired() == ["r"], "a lease of 5 s is not over after 5 s"
    offer = {**from_elsewhere(8, "p"), "remote_block_ids": [50, 51, 52]}
    connector.update_state_after_alloc(request_of("r", 8, offer, 0, 3), [5, 2, 8, 6], 5)
    found = reads_of(connector)
    assert found == [("r", [2, 8], [51, 52], "p")], f"blocks of 3 tokens, 3 are here: reads {found}"
    asked = connector.get_num_new_matched_tokens(request_of("again", 8, dict(from_elsewhere(8)), 0, 3), 3)
    assert_answer(asked, (None, False), "blocks of 3 tokens, 3 are here, and the second is being read for another")


def check_others_are_not_held(module):
    """Ordinary requests, and those that were aborted or have failed, are freed at once."""
    stopped = RequestStatus.FINISHED_STOPPED
    wanted = {"do_remote_decode": True}
    held, _ = ended(connector_of(module), request_of("r", 6, dict(wanted)), [1, 2], stopped)
    assert held is True, "a stop token has ended it: a prompt that is computed all the same"
    cases = [(None, stopped), ({}, stopped), ({"do_remote_decode": False}, stopped)]
    cases += [(wanted, RequestStatus.FINISHED_ABORTED), (wanted, RequestStatus.FINISHED_ERROR)]
    for params, status in cases:
        clock = Clock()
        connector = connector_of(module, clock)
        said = ended(connector, request_of("r", 6, params and dict(params)), [1, 2], status)
        where = f"kv_transfer_params {params}, finish_reason {status.finish_reason!r}"
        assert said == (False, None), f"{where}: {said}, and (False, None) is right"
        clock.now += 10 * LEASE
        assert connector.expired() == [], f"{where}: it was freed at once, so it has no lease"


def check_a_lease_ends(module):
    """Blocks that were not read in time are freed: listed once, at the lease's end and not before."""
    clock = Clock()
    connector = connector_of(module, clock)
    for name in ("early", "sent", "as early"):
        ended(connector, request_of(name, 6, {"do_remote_decode": True}), [1, 2])
    clock.now += 10
    ended(connector, request_of("late", 6, {"do_remote_decode": True}), [3, 4])
    connector.update_connector_output({"sent", "unknown"}, {"late"})  # its prompt came from elsewhere, too
    for seconds, right in (
        (10.5, []),
        (9.4375, []),
        (0.0625, ["as early", "early"]),
        (0.25, []),
        (9.6875, []),
        (0.0625, ["late"]),
        (99, []),
    ):
        clock.now += seconds
        found = connector.expired()
        said = (
            f"{clock.now - clock.start:g} s after the first, with leases of {LEASE:g} s: {found}, and {right} is right"
        )
        assert isinstance(found, list), f"expired returns {type(found).__name__}, not a list"
        assert "sent" not in found, f"{said}: its blocks were sent in time, and are freed already"
        assert sorted(found) == right, said
    connector.update_connector_output({"early", "late"}, set())


# ---- a life of many requests -----------------------------------------------------------------------------------------


class ByTheBook:
    """Makes the right decisions, to compare a learner's with."""

    def __init__(self):
        self.reads, self.in_flight, self.held = [], {}, {}

    def ask(self, request, num_local):
        params, place = request.kv_transfer_params or {}, num_local // BLOCK_SIZE
        if not params.get("do_remote_prefill"):
            return 0, False
        if any(one in hashes for one in request.block_hashes[place:][:1] for hashes in self.in_flight.values()):
            return None, False
        num_tokens = params["remote_num_tokens"] - num_local
        return max(num_tokens, 0), num_tokens > 0

    def admit(self, request, num_local, num_external, table):
        params = request.kv_transfer_params or {}
        if not params.get("do_remote_prefill"):
            return
        its = params["remote_block_ids"]
        first = num_local // BLOCK_SIZE if num_external else len(its)
        its_name = params["remote_request_id"]
        self.reads.append((request.request_id, table[first : len(its)], its[first:], its_name))
        if num_external:
            full = params["remote_num_tokens"] // BLOCK_SIZE
            self.in_flight[request.request_id] = set(request.block_hashes[first:full])


def check_many_requests(module):
    """Through 400 random events, the answers, the reads and the leases are those of the rules."""
    draw, clock, book = random.Random(0), Clock(), ByTheBook()
    connector, done = connector_of(module, clock), []
    for index in range(400):
        kind, name = draw.choice(["here", "there", "there", "there", "for others", "time", "news"]), f"r{index}"
        if kind == "time":
            clock.now += draw.choice([1.0, 7.0])
            late = [one for one, until in book.held.items() if until <= clock.now]
            for one in late:
                del book.held[one]
            found = connector.expired()
            assert sorted(found) == sorted(late), f"event {index}: {found} have expired, and {late} is right"
        elif kind == "news":
            sent, received = (set(draw.sample(list(ones), len(ones) // 2)) for ones in (book.held, book.in_flight))
            connector.update_connector_output(sent, received)
            for one in sent:
                del book.held[one]
            for one in received:
                del book.in_flight[one]
        elif kind == "for others":
            request = request_of(name, draw.randint(1, 20), {"do_remote_decode": True})
            status = draw.choice([RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_ABORTED])
            held, _ = ended(connector, request, range(1, 9), status)
            right = status is RequestStatus.FINISHED_LENGTH_CAPPED
            assert held is right, f"event {index}: held is {held}, and {right} is right"
            if right:
                book.held[name] = clock.now + LEASE
        else:
            _one_arrives(connector, book, draw, name, kind, done, index)


def _one_arrives(connector, book, draw, name, kind, done, index):
    num_tokens, first = draw.randint(1, 20), draw.choice([0, 0, 100, 200])
    request = remote(name, num_tokens, first) if kind == "there" else request_of(name, num_tokens, None, first)
    num_local = draw.randint(0, (num_tokens - 1) // BLOCK_SIZE) * BLOCK_SIZE
    where, right = f"event {index}, {num_tokens} tokens, {num_local} here", book.ask(request, num_local)
    assert_answer(connector.get_num_new_matched_tokens(request, num_local), right, where)
    if right[0] is None:
        return
    table = draw.sample(range(10, 99), 8)
    book.admit(request, num_local, right[0], table)
    allocated(connector, request, table, right[0])
    if draw.random() < 0.5:
        found = reads_of(connector)
        assert found == book.reads, f"{where}: reads {found}, and {book.reads} is right"
        book.reads = []
