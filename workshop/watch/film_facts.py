"""Facts read from a film's events: the numbers, requests and blocks that captions name.

Each function takes the films of a chapter and returns the words for its caption. If a film does not
show the chapter's topic, the function raises `NotShown`: then there is no caption and no page."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import TypeVar

from common.events.event_kinds import (
    Admitted,
    Arrived,
    Computed,
    Event,
    Evicted,
    Finished,
    Matched,
    Planned,
    Preempted,
    Table,
    Taken,
)
from workshop.watch.replay.film import Cell, Film

Facts = dict[str, int | str]
Kind = TypeVar("Kind", bound=Event)


class NotShown(ValueError):
    """The film does not show what its caption is about."""


def _require(is_shown: object, what: str) -> None:
    if not is_shown:
        raise NotShown(f"the film does not show {what}")


def happened(film: Film, kind: type[Kind]) -> Iterator[tuple[int, Kind]]:
    """Yield all events of a kind, each with its step."""
    for part in film.steps():
        for event in part.events:
            if isinstance(event, kind):
                yield part.number, event


def first(
    film: Film, kind: type[Kind], is_it: Callable[[int, Kind], object], what: str
) -> tuple[int, Kind]:
    found = next((pair for pair in happened(film, kind) if is_it(*pair)), None)
    if found is None:
        raise NotShown(f"the film does not show {what}")
    return found


def _first(film: Film, kind: type[Kind], what: str) -> tuple[int, Kind]:
    return first(film, kind, lambda *_: True, what)


def cells(film: Film) -> list[list[Cell]]:
    """Return the cells that each step computed."""
    found: list[list[Cell]] = []
    for part in film.steps():
        found.append([])
        for position, event in enumerate(part.events, part.first + 1):
            if isinstance(event, Planned):
                found[-1] += film.state_behind(position).cells(event)
    return found


def _listed(blocks: Sequence[int]) -> str:
    return ", ".join(map(str, blocks))


def _outputs(film: Film) -> dict[str, list[int]]:
    return {name: request.outputs for name, request in film.last_state().requests.items()}


def _check_same_answers(films: Sequence[Film]) -> None:
    first_answers, *others = map(_outputs, films)
    _require(all(answers == first_answers for answers in others), "the same tokens in both runs")


def a_little_of_everything(film: Film) -> Facts:
    """A cache hit, a preemption, the preempted request's return, accepted draft tokens."""
    requests = film.last_state().requests
    step, preempted = _first(film, Preempted, "a preemption")
    victim = preempted.request
    taken = [e for at, e in happened(film, Taken) if at == step and e.request != victim]
    _require(taken, "for whom it is")
    late, _ = first(
        film, Admitted, lambda at, e: at > step and e.request == victim, f"that {victim!r} returns"
    )
    known = {event.request for at, event in happened(film, Admitted) if at < step}
    hit, found = first(
        film,
        Admitted,
        lambda _, e: e.num_cached_tokens and e.request not in known,
        "a new request's cache hit",
    )
    guess, computed = first(
        film,
        Computed,
        lambda _, e: any(a and not r for a, r in e.verified.values()),
        "accepted draft tokens",
    )
    lucky = next(name for name, (a, r) in computed.verified.items() if a and not r)
    return {
        "num_requests": len(requests),
        "num_seats": film.run.max_num_seqs,
        "num_blocks": film.run.num_blocks - 1,
        "block_size": film.run.block_size,
        "budget": film.run.max_num_batched_tokens,
        "step": step,
        "victim": victim,
        "taker": str(taken[-1].request),
        "num_preempted_tokens": preempted.num_lost_tokens,
        "late": late,
        "hit": hit,
        "newcomer": found.request,
        "num_found": found.num_cached_tokens,
        "guess": guess,
        "lucky": lucky,
        "num_right": computed.verified[lucky][0],
    }


def static_and_continuous(static: Film, continuous: Film) -> Facts:
    _check_same_answers([static, continuous])
    end, finished = _first(static, Finished, "that somebody ends")
    longest = max(static.state_after(end + 1).running, key=lambda name: _end_of(static, name))
    joined, new_request = first(
        continuous, Admitted, lambda step, _: step > 0, "that somebody joins a running batch"
    )
    _require(joined == end + 1 and new_request.request != finished.request, "a seat that is used")
    name = new_request.request
    late, _ = first(static, Admitted, lambda _, e: e.request == name, f"{name!r} at last")
    for step in range(joined, late):
        reason = static.state_after(step).reason_to_wait(name)
        _require(reason == "constraint", f"that {name!r} waits for the batch in step {step}")
    _require(late == _end_of(static, longest) + 1, f"that {name!r} waits for {longest!r}")
    return {
        "ended": finished.request,
        "end": end,
        "joined": joined,
        "newcomer": name,
        "longest": longest,
        "longest_end": late - 1,
        "late": late,
        "num_requests": len(static.last_state().requests),
        "num_seats": static.run.max_num_seqs,
        "static_steps": static.num_steps,
        "continuous_steps": continuous.num_steps,
    }


def _end_of(film: Film, name: str) -> int:
    return first(film, Finished, lambda _, e: e.request == name, f"the end of {name!r}")[0]


def reserved_tables(film: Film) -> Facts:
    """Blocks for the maximum length are allocated at admission, so that a request waits for blocks
    while allocated ones are still empty."""
    size = film.run.block_size
    step, stopped = first(
        film, Planned, lambda _, e: e.stop and e.stop[0] == "blocks", "who waits for blocks"
    )
    name = (stopped.stop or [""])[1]
    state = film.state_after(step)
    num_free, running = len(state.free), [state.requests[one] for one in state.running]
    num_empty = sum(len(one.table) + -one.num_computed_tokens // size for one in running)
    late, _ = first(film, Admitted, lambda _, e: e.request == name, f"{name!r} at last")
    table = film.state_after(late).requests[name].table
    gone, left = first(film, Finished, lambda at, _: at == late - 1, "who makes room")
    given_back = film.state_after(gone - 1).requests[left.request].table
    _require(set(table) & set(given_back), "a block in a second table")
    _require(any(a + 1 != b for a, b in pairwise(table)), "a table that is not in order")
    begun = {e.request for _, e in happened(film, Admitted)}
    taken = [e.request for _, e in happened(film, Taken)]
    _require(sorted(begun) == sorted(map(str, taken)), "that no table grows")
    a, owner = next(iter(film.last_state().requests.items()))
    return {
        "a": a,
        "begin": 0,
        "num_prompt": len(owner.prompt),
        "num_tokens": len(owner.prompt) + owner.max_tokens - 1,
        "num_all": len(film.state_after(0).requests[a].table),
        "num_filled": -(-len(owner.prompt) // size),
        "block_size": size,
        "step": step,
        "c": name,
        "num_needed": len(table),
        "num_free": num_free,
        "num_empty": num_empty,
        "late": late,
        "b": left.request,
        "table": _listed(table),
        "first": table[0],
    }


def shared_prefix(film: Film) -> Facts:
    """A match of the start of a block chain; later its end is evicted and its start still found."""
    _require(film.run.prefix_cache == "hash", "a chain of hashes")
    step, match = _first(film, Matched, "a match")
    name, trunk = str(match.request), match.blocks
    others = [other for other in film.state_after(step).users_of(trunk[0]) if other != name]
    _require(others, "that somebody else has these blocks")
    owner = others[0]
    own = film.state_after(_end_of(film, owner) - 1).requests[owner].table[len(trunk) :]
    cached = film.state_after(step).cached
    _require(cached[own[0]].parent == trunk[-1], f"a block of {owner!r} alone behind the shared")
    late, _ = _first(film, Evicted, "an eviction")
    back, again = first(
        film, Matched, lambda at, e: at > late and e.blocks == trunk, "a match of what is left"
    )
    kept = film.state_after(_end_of(film, owner)).cached
    own = [block for block in own if block in kept]  # full ones
    gone = [(at, block) for at, e in happened(film, Evicted) for block in e.blocks if at < back]
    _require([block for _, block in gone] == own[::-1], f"that {owner!r}'s end goes, last first")
    prompt = len(film.last_state().requests[name].prompt)
    num_cached = film.last_state().requests[name].num_cached_tokens
    return {
        "a": owner,
        "b": name,
        "step": step,
        "last": trunk[-1],
        "num_trunk": len(trunk),
        "num_prompt": prompt,
        "num_computed": prompt - num_cached,
        "late": gone[-1][0],
        "last_gone": gone[-1][1],
        "gone": " and ".join(f"block {block} in step {at}" for at, block in gone),
        "gone_zh": "，".join(f"第 {at} 步的块 {block}" for at, block in gone),
        "back": back,
        "c": str(again.request),
    }


def preemption_and_return(film: Film) -> Facts:
    step, preempted = _first(film, Preempted, "a preemption")
    name = preempted.request
    before = film.state_after(step - 1)
    table = list(before.requests[name].table)
    _require(not before.free, "that no block is free")
    _require(list(before.running)[-1] == name, "that the last admitted is the victim")
    _, taken = first(film, Taken, lambda at, _: at == step, "who needs a block")
    _require(taken.request != name, "that the block is for another")
    _require(set(taken.blocks) <= set(table), "that the victim's blocks are used at once")
    _require(all(n == 1 for _, n in _preemptions(film)), "that no request is preempted twice")
    late, _ = first(
        film, Admitted, lambda at, e: at > step and e.request == name, f"that {name!r} returns"
    )
    again = sum(
        cell.num_tokens
        for cell in cells(film)[late]
        if cell.request == name and cell.kind == "recomputed"
    )
    _require(again == preempted.num_lost_tokens, "that what was lost is computed again")
    for at in range(step, late):
        reason, why = (
            film.state_after(at).reason_to_wait(name),
            "blocks" if at > step else "preempting",
        )
        _require(reason == why, f"that {name!r} waits for blocks in step {at}")
    return {
        "step": step,
        "victim": name,
        "taker": str(taken.request),
        "num_all": film.run.num_blocks - 1,
        "num_blocks": len(table),
        "num_preempted_tokens": preempted.num_lost_tokens,
        "late": late,
        "num_waited": late - step,
    }


def _preemptions(film: Film) -> list[tuple[str, int]]:
    requests = film.last_state().requests
    return [(n, r.num_preemptions) for n, r in requests.items() if r.num_preemptions]


def guesses(plain: Film, guessing: Film) -> Facts:
    """A step that accepts all draft tokens of one request and rejects all of another."""
    _check_same_answers([plain, guessing])

    def is_both(_: int, event: Computed) -> bool:
        counts = event.verified.values()
        return any(a and not r for a, r in counts) and any(r and not a for a, r in counts)

    step, computed = first(
        guessing, Computed, is_both, "accepted and rejected draft tokens in one step"
    )
    verified = computed.verified
    right = next(name for name, (_, rejected) in verified.items() if not rejected)
    wrong = next(name for name, (accepted, _) in verified.items() if not accepted)
    num_right, num_wrong = verified[right][0], verified[wrong][1]
    _require(len(computed.tokens[right]) == num_right + 1, f"what {right!r} gains")
    _require(len(computed.tokens[wrong]) == 1, f"that {wrong!r} loses nothing")
    return {
        "step": step,
        "right": right,
        "num_right": num_right,
        "num_gained": num_right + 1,
        "wrong": wrong,
        "num_wrong": num_wrong,
        "plain_steps": plain.num_steps,
        "guessing_steps": guessing.num_steps,
    }


def long_prompt(whole: Film, pieces: Film) -> Facts:
    """The longest prompt, which `whole` computes in one step and `pieces` in several."""
    _check_same_answers([whole, pieces])
    requests = whole.last_state().requests
    name = max(requests, key=lambda name: len(requests[name].prompt))
    num_prompt = len(requests[name].prompt)
    of_whole, of_pieces = ([_prompt_of(step, name) for step in cells(f)] for f in (whole, pieces))
    step = next(i for i, n in enumerate(of_whole) if n)
    _require(of_whole[step] == num_prompt, f"that the prompt of {name!r} is computed whole")
    cut = [i for i, n in enumerate(of_pieces) if n]
    _require(cut[0] == step and len(cut) > 2, f"that the prompt of {name!r} comes in pieces")
    others = sorted(n for n in whole.state_after(step).running if n != name)
    for at in cut:
        got = {cell.request for cell in cells(pieces)[at] if cell.kind == "decode"}
        _require(set(others) <= got, f"that the others go on in step {at}")
    return {
        "name": name,
        "num_prompt": num_prompt,
        "step": step,
        "others": " and ".join(others),
        "others_zh": "、".join(others),
        "num_whole": sum(cell.num_tokens for cell in cells(whole)[step]),
        "num_most": max(sum(cell.num_tokens for cell in c) for c in cells(pieces)),
        "num_pieces": len(cut),
        "size": of_pieces[step],
        "last": cut[-1],
    }


def _prompt_of(step: list[Cell], name: str) -> int:
    return sum(c.num_tokens for c in step if c.request == name and c.kind == "prompt")


# -- of pages beyond the chapters


def mixed_adapters(film: Film) -> Facts:
    """Two requests with one prompt and different adapters; one that waits until another's adapter
    is unloaded."""
    requests = film.last_state().requests
    base = next(r for r in requests.values() if not r.adapter)
    users = [r for r in requests.values() if r.adapter and r.prompt == base.prompt]
    _require(len(users) == 2 and base.outputs != users[0].outputs, "a prompt with two texts")
    owner, again = users
    _require(not owner.num_cached_tokens, f"that {owner.request_id!r} finds nothing")
    _require(again.num_cached_tokens, f"that {again.request_id!r} finds something")
    step, name = _overtaken(film, "constraint")
    other = requests[name].adapter
    held = {requests[one].adapter for one in film.state_after(step).running} - {""}
    _require(len(held) == film.run.config["max_loras"], "that all slots are taken")
    _require(other not in held, f"that {name!r} wants another adapter")
    late, _ = first(film, Admitted, lambda _, e: e.request == name, f"{name!r} at last")
    gone = max(_end_of(film, user.request_id) for user in users)
    _require(late == gone + 1, "that it begins when the slot is free")
    return {
        "a": base.request_id,
        "b": owner.request_id,
        "adapter": owner.adapter,
        "f": again.request_id,
        "found": first(film, Admitted, lambda _, e: e.request == again.request_id, "it")[0],
        "num_found": again.num_cached_tokens,
        "step": step,
        "d": name,
        "other": other,
        "e": _overtaker(film, step),
        "num_slots": len(held),
        "late": late,
        "gone": gone,
    }


def constrained(film: Film) -> Facts:
    """A request that waits for its grammar and is overtaken; a second one with the same grammar;
    both texts match the grammar."""
    requests = film.last_state().requests
    free = next(r for r in requests.values() if not r.grammar)
    step, name = _overtaken(film, "grammar")
    bound = requests[name]
    _require(bound.prompt == free.prompt, "two with one prompt")
    begun = {e.request: at for at, e in happened(film, Admitted)}
    late, others = begun[name], [n for n in requests if requests[n].grammar == bound.grammar]
    twin = next((n for n in others if n != name and begun[n] == late), None)
    _require(twin is not None, "two who wait for one grammar")
    for one in (bound, requests[twin or name]):
        _require(_is_json(one.text) and one.finish_reason == "stop", f"that {one} is JSON")
    _require(not _is_json(free.text), "that a free text is none")
    arrived = next(at for at, e in happened(film, Arrived) if e.request == name)
    return {
        "a": free.request_id,
        "b": name,
        "step": step,
        "c": _overtaker(film, step),
        "num_waited": late - arrived,
        "late": late,
        "e": str(twin),
        "end": _end_of(film, name),
    }


def window_groups(film: Film) -> Facts:
    """A request that frees its oldest blocks in a group with a window; one that finds there the
    blocks its window sees; one that finds none, although the other group has its prefix."""
    windowed = next((i for i, window in enumerate(film.run.windows) if window), None)
    if windowed is None:
        raise NotShown("the film does not show layers with a window")
    step, left = first(
        film, Table, lambda _, e: e.group == windowed and 0 in e.blocks, "a table without its left"
    )
    gone = film.state_after(step - 1).requests[left.request].tables[windowed][left.keep]
    found, hit = first(film, Matched, lambda _, e: e.group == windowed and e.blocks, "a hit")
    whole = next(e for at, e in happened(film, Matched) if (at, e.group) == (found, 0))
    _require(len(hit.blocks) < len(whole.blocks), "that a window needs less")
    owner = next(n for n in film.state_after(found - 1).users_of(hit.blocks[-1]))
    for lost, event in happened(film, Admitted):
        prompt = film.last_state().requests[event.request].prompt
        num_there = [_num_known(film, lost - 1, prompt, group) for group in (0, windowed)]
        if not event.num_cached_tokens and num_there[0] > num_there[1]:
            break
    else:
        raise NotShown("the film does not show a prefix that holds in one group alone")
    return {
        "window": film.run.windows[windowed],
        "step": step,
        "a": left.request,
        "gone": gone,
        "found": found,
        "c": str(hit.request),
        "owner": owner,
        "num_found": len(whole.blocks) * film.run.block_size,
        "num_all": len(whole.blocks),
        "num_seen": len(hit.blocks),
        "first_seen": hit.blocks[0],
        "lost": lost,
        "e": event.request,
        "num_there": num_there[0] * film.run.block_size,
    }


def _num_known(film: Film, step: int, prompt: list[int], group: int) -> int:
    """The number of a prompt's leading blocks that can be found in a group after a step."""
    cached, size = film.state_after(step).cached.values(), film.run.block_size
    known = {(c.place, c.tokens) for c in cached if c.group == group}
    blocks = [tuple(prompt[i : i + size]) for i in range(0, len(prompt) - 1, size)]
    missing = (i for i, tokens in enumerate(blocks) if (i, tokens) not in known)
    return next(missing, len(blocks))


def _overtaken(film: Film, reason: str) -> tuple[int, str]:
    """The first step in which a later request starts before one that waits for this reason, and the
    waiting request's id."""
    order = list(film.last_state().requests)
    for step, event in happened(film, Admitted):
        state = film.state_after(step)
        for name in state.waiting:
            if state.reason_to_wait(name) == reason and order.index(name) < order.index(
                event.request
            ):
                return step, name
    raise NotShown(f"the film does not show who is overtaken ({reason})")


def _overtaker(film: Film, step: int) -> str:
    return [e.request for at, e in happened(film, Admitted) if at == step][-1]


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True
