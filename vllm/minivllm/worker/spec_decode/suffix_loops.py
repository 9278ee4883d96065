"""The loops of `suffix_tree.py`, compiled by numba where it is installed. They work on the tree's arrays.

A tree holds every suffix of its sequences, cut off after `max_depth` tokens. Nodes where nothing branches are one node
with a longer label, so there are about two nodes for each token. Node 0 is the root, and as a neighbour or a child 0
means none; so does slot 0 of the text.

- `nodes` [capacity, 9], int32: see the columns below.
- `table` [power of two], int32: the children, hashed by their parent and first token, open addressing.
- `text` [slots, 2], int32: tokens, each with the slot of the token behind it in its sequence.
- `state` [4], int64: see its cells below.
- `sequence` [2, max_depth + 1], int32: [0, 0] is the number of suffixes that still grow, [0, n] the node at which the
  suffix of n tokens ends; [1, 0] is the slot of the first token, [1, n] that of the last but n - 1.

Siblings are a list with the greatest count first. Where counts are equal the order is that of arctic-inference, since
it decides which draft is made: a new child goes to the end; one whose count has grown goes to the front of those with
the new count if it was the first with the old one, else to their end; one whose count has shrunk stays behind all with
the old count. The root's children are in no order, since no draft begins there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from minivllm.platforms.threads import has_numba

COUNT, TOKEN, LENGTH, TEXT, PARENT, FIRST, LAST, NEXT, PREVIOUS = range(9)
"""Columns of `nodes`: suffixes that pass or end here; the label: its first token, its length and the slot of its text;
the node above; the first and the last child; the neighbours among the siblings."""
USED, FREE, NUM_FREE, TEXT_USED = range(4)
"""Cells of `state`: nodes ever taken; the first of those given back, which `NEXT` chains, and their number; slots."""
ROOT = 0


def jit(function: Callable[..., Any]) -> Any:
    """Compiled by numba, or as it is where numba is missing: then slow, with the same results."""
    if not has_numba():
        return function
    from numba import njit

    return njit(nogil=True)(function)


def kept_on_disk(function: Callable[..., Any]) -> Any:
    """As `jit`, for what Python calls; what has been compiled is kept for the next process, if it can be."""
    if not has_numba():
        return function
    from minivllm.kernels.cpu.programs import compile_function

    return compile_function(function)


@jit
def home_of(parent, token, mask):
    """Where the table looks first for a child."""
    mixed = int(parent) * 2654435761 + int(token) * 40503
    return (mixed ^ (mixed >> 15)) & mask


@jit
def place_of(parent, token, nodes, table):
    """The place of a child in the table, or the empty one where it would be."""
    mask = len(table) - 1
    place = home_of(parent, token, mask)
    while table[place] and not (nodes[table[place], PARENT] == parent and nodes[table[place], TOKEN] == token):
        place = (place + 1) & mask
    return place


@jit
def enter(node, nodes, table):
    """Enters a node into the table by its parent and first token."""
    table[place_of(nodes[node, PARENT], nodes[node, TOKEN], nodes, table)] = node


@jit
def vacate(node, nodes, table):
    """Takes a node out of the table. Those behind it move up, so that none is behind an empty place."""
    mask = len(table) - 1
    hole = place_of(nodes[node, PARENT], nodes[node, TOKEN], nodes, table)
    place = hole
    while True:
        place = (place + 1) & mask
        other = table[place]
        if other == 0:
            break
        home = home_of(nodes[other, PARENT], nodes[other, TOKEN], mask)
        if (place - home) & mask >= (place - hole) & mask:
            table[hole] = other
            hole = place
    table[hole] = 0


@jit
def unlink(node, nodes):
    """Takes a node out of the list of its siblings."""
    parent, before, behind = nodes[node, PARENT], nodes[node, PREVIOUS], nodes[node, NEXT]
    if before:
        nodes[before, NEXT] = behind
    else:
        nodes[parent, FIRST] = behind
    if behind:
        nodes[behind, PREVIOUS] = before
    else:
        nodes[parent, LAST] = before


@jit
def link(node, before, behind, nodes):
    """Puts a node between two siblings; 0 is the end of the list."""
    parent = nodes[node, PARENT]
    nodes[node, PREVIOUS], nodes[node, NEXT] = before, behind
    if before:
        nodes[before, NEXT] = node
    else:
        nodes[parent, FIRST] = node
    if behind:
        nodes[behind, PREVIOUS] = node
    else:
        nodes[parent, LAST] = node


@jit
def take_place(old, new, nodes, table):
    """Puts `new` where `old` is among its siblings and in the table; both have the same first token."""
    table[place_of(nodes[old, PARENT], nodes[old, TOKEN], nodes, table)] = new
    nodes[new, PARENT] = nodes[old, PARENT]
    if nodes[old, PARENT] != ROOT:
        link(new, nodes[old, PREVIOUS], nodes[old, NEXT], nodes)


@jit
def count_up(node, nodes):
    """One more suffix passes or ends here."""
    count, before = nodes[node, COUNT], nodes[node, PREVIOUS]
    if nodes[node, PARENT] != ROOT and before and nodes[before, COUNT] <= count + 1:
        same = nodes[before, COUNT]
        while nodes[before, PREVIOUS] and nodes[nodes[before, PREVIOUS], COUNT] == same:
            before = nodes[before, PREVIOUS]
        unlink(node, nodes)
        link(node, nodes[before, PREVIOUS], before, nodes)
    nodes[node, COUNT] = count + 1


@jit
def count_down(node, nodes):
    """One suffix less passes or ends here."""
    count, last = nodes[node, COUNT], node
    if nodes[node, PARENT] != ROOT:
        while nodes[last, NEXT] and nodes[nodes[last, NEXT], COUNT] == count:
            last = nodes[last, NEXT]
        if last != node:
            unlink(node, nodes)
            link(node, last, nodes[last, NEXT], nodes)
    nodes[node, COUNT] = count - 1


@jit
def new_node(count, slot, parent, nodes, table, text, state):
    """A node of one token, in the table, not yet among its siblings."""
    node = state[FREE]
    if node:
        state[FREE] = nodes[node, NEXT]
        state[NUM_FREE] -= 1
    else:
        node = state[USED]
        state[USED] += 1
    nodes[node, :] = 0
    nodes[node, COUNT], nodes[node, TOKEN], nodes[node, LENGTH] = count, text[slot, 0], 1
    nodes[node, TEXT], nodes[node, PARENT] = slot, parent
    return node


@jit
def give_back(node, nodes, state):
    """Frees a node that is in no list and not in the table."""
    nodes[node, COUNT], nodes[node, NEXT] = 0, state[FREE]
    state[FREE] = node
    state[NUM_FREE] += 1


@jit
def shorten(node, nodes, text):
    """Takes the first token from a node's label. The node must not be in the table."""
    nodes[node, LENGTH] -= 1
    nodes[node, TEXT] = text[nodes[node, TEXT], 1]
    nodes[node, TOKEN] = text[nodes[node, TEXT], 0]


@jit
def lengthen(node, sequence, nodes):
    """Adds the sequence's last token to the label of a node at which one of its suffixes ended."""
    nodes[node, LENGTH] += 1
    nodes[node, TEXT] = sequence[1, nodes[node, LENGTH]]


@jit
def branch(node, slot, nodes, table, text, state):
    """A new last child for a token that has not been seen behind `node`."""
    child = new_node(1, slot, node, nodes, table, text, state)
    enter(child, nodes, table)
    if node != ROOT:
        link(child, nodes[node, LAST], 0, nodes)
    return child


@jit
def join(node, child, sequence, nodes, table, text, state):
    """A suffix goes on from `node` as all others do: the label of `node` takes a token over from its only child.

    Returns the node at which the suffix then ends. If nothing is left of the child's label, the child takes all of
    `node`'s, and its place.
    """
    vacate(child, nodes, table)
    if nodes[child, LENGTH] > 1:
        lengthen(node, sequence, nodes)
        shorten(child, nodes, text)
        enter(child, nodes, table)
        return node
    nodes[child, COUNT] += 1
    nodes[child, TOKEN], nodes[child, LENGTH] = nodes[node, TOKEN], nodes[node, LENGTH]
    lengthen(child, sequence, nodes)
    take_place(node, child, nodes, table)
    give_back(node, nodes, state)
    return child


@jit
def descend(child, slot, nodes, table, text, state):
    """A suffix goes one token into `child`, which is divided behind that token. Returns the node at which it ends."""
    if nodes[child, LENGTH] > 1:
        upper = new_node(nodes[child, COUNT], slot, nodes[child, PARENT], nodes, table, text, state)
        take_place(child, upper, nodes, table)
        shorten(child, nodes, text)
        nodes[child, PARENT] = upper
        link(child, 0, 0, nodes)
        enter(child, nodes, table)
        child = upper
    count_up(child, nodes)
    return child


@jit
def follow(node, sequence, nodes, table, text, state):
    """Extends a suffix that ends at `node` by the sequence's last token. Returns the node at which it ends then."""
    slot = sequence[1, 1]
    child = table[place_of(node, text[slot, 0], nodes, table)]
    if not child:
        if node == ROOT or nodes[node, COUNT] > 1:
            return branch(node, slot, nodes, table, text, state)
        lengthen(node, sequence, nodes)
        return node
    if node != ROOT and nodes[node, COUNT] == nodes[child, COUNT] + 1:
        return join(node, child, sequence, nodes, table, text, state)
    return descend(child, slot, nodes, table, text, state)


@kept_on_disk
def extend(tokens, sequence, nodes, table, text, state):
    """Appends tokens to a sequence; returns how many there was room for."""
    depth = sequence.shape[1] - 1
    for index in range(len(tokens)):
        if len(nodes) - state[USED] + state[NUM_FREE] < depth or state[TEXT_USED] == len(text):
            return index
        slot = state[TEXT_USED]
        state[TEXT_USED] += 1
        text[slot, 0], text[slot, 1] = tokens[index], 0
        grows = sequence[0, 0]
        if grows:
            text[sequence[1, 1], 1] = slot
        else:
            sequence[1, 0] = slot
        grows = min(grows + 1, depth)
        sequence[0, 0] = grows
        for length in range(grows, 1, -1):
            sequence[0, length], sequence[1, length] = sequence[0, length - 1], sequence[1, length - 1]
        sequence[0, 1], sequence[1, 1] = ROOT, slot
        for length in range(grows, 0, -1):
            sequence[0, length] = follow(sequence[0, length], sequence, nodes, table, text, state)
    return len(tokens)


@kept_on_disk
def remove(sequence, nodes, table, text, state):
    """Takes all suffixes of a sequence out of the tree; returns its number of tokens. Its text stays."""
    start, num_tokens = sequence[1, 0], 0
    while start:
        num_tokens += 1
        node, slot = ROOT, start
        while slot:
            child = table[place_of(node, text[slot, 0], nodes, table)]
            if not child:
                break
            if nodes[child, COUNT] == 1:
                remove_last(child, nodes, table, state)
                break
            count_down(child, nodes)
            for _ in range(nodes[child, LENGTH]):
                slot = text[slot, 1]
            node = child
        start = text[start, 1]
    return num_tokens


@jit
def remove_last(node, nodes, table, state):
    """Removes a node that only one suffix passes, with what is below it."""
    if nodes[node, PARENT] != ROOT:
        unlink(node, nodes)
    while node:
        below = nodes[node, FIRST]
        vacate(node, nodes, table)
        give_back(node, nodes, state)
        node = below


@jit
def continuation(node, offset, slot, most, least, nodes, text, tokens, probs):
    """The most frequent continuation behind `offset` tokens of a node's label, into `tokens` and `probs`, [most] at
    least; `slot` is that of the next token. Returns its length, and the sum of the probabilities."""
    count, prob, score = 0, np.float32(1.0), np.float32(0.0)
    while count < most and prob >= least:
        if offset == nodes[node, LENGTH]:
            child = nodes[node, FIRST]
            if not child:
                break
            prob = np.float32(prob * np.float32(np.float32(nodes[child, COUNT]) / np.float32(nodes[node, COUNT])))
            node, offset, slot = child, 0, nodes[child, TEXT]
            continue
        tokens[count], probs[count] = text[slot, 0], prob
        score = np.float32(score + prob)
        count, offset, slot = count + 1, offset + 1, text[slot, 1]
    return count, score


@jit
def matched(context, nodes, table, text):
    """The node in which all of `context` ends, the tokens of its label that this takes, and the next one's slot.

    Node 0 if the tree does not hold it.
    """
    node, offset, slot = ROOT, 0, 0
    for token in context:
        if offset == nodes[node, LENGTH]:
            node = table[place_of(node, token, nodes, table)]
            if not node:
                break
            offset, slot = 0, nodes[node, TEXT]
        if text[slot, 0] != token:
            node = ROOT
            break
        offset, slot = offset + 1, text[slot, 1]
    return node, offset, slot


@kept_on_disk
def speculate(context, most, factor, least, nodes, table, text, tokens, probs):
    """The continuation with the highest sum of probabilities over all lengths of match, the longest where equal.

    `tokens` and `probs` [2, most] take it, in the row returned first; then its length, the length of its match, its
    score.
    """
    row, length, match, score = 0, 0, 0, np.float32(0.0)
    for size in range(1, len(context)):
        node, offset, slot = matched(context[len(context) - size :], nodes, table, text)
        if not node:
            break
        allowed = min(most, int(np.float64(np.float32(size) * np.float32(factor)) + 1e-6))
        count, found = continuation(node, offset, slot, allowed, least, nodes, text, tokens[1 - row], probs[1 - row])
        if found >= score:
            row, length, match, score = 1 - row, count, size, found
    return row, length, match, score


@kept_on_disk
def rehash(nodes, table, state):
    """Enters all nodes into an empty table."""
    for node in range(1, state[USED]):
        if nodes[node, COUNT]:
            enter(node, nodes, table)


@kept_on_disk
def copy_text(firsts, old, new, moved):
    """Copies the text of the sequences that begin at `firsts`; `moved` [slots] says where to. Returns slots used."""
    used = 1
    for slot in firsts:
        while slot:
            new[used, 0], moved[slot] = old[slot, 0], used
            slot = old[slot, 1]
            new[used, 1] = used + 1 if slot else 0
            used += 1
    return used


@kept_on_disk
def num_orphans(nodes, moved, state):
    """Tokens in the labels whose text was not moved."""
    count = 0
    for node in range(1, state[USED]):
        if nodes[node, COUNT] and not moved[nodes[node, TEXT]]:
            count += nodes[node, LENGTH]
    return count


@kept_on_disk
def move_labels(nodes, old, new, moved, state):
    """Lets all labels read the new text; those whose sequence is gone get a copy of their own."""
    for node in range(1, state[USED]):
        if not nodes[node, COUNT]:
            continue
        slot = nodes[node, TEXT]
        nodes[node, TEXT] = moved[slot] if moved[slot] else state[TEXT_USED]
        if moved[slot]:
            continue
        for _ in range(nodes[node, LENGTH]):
            used = state[TEXT_USED]
            new[used, 0], new[used, 1] = old[slot, 0], used + 1
            slot = old[slot, 1]
            state[TEXT_USED] += 1
