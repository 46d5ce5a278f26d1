"""Facts read from a film's frames: the numbers, requests and blocks that captions name.

Each function takes the films of a chapter and returns the words for its caption. If a film does not
show the chapter's topic, the function raises `NotShown`: then there is no caption and no page."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

from common.events.frames import Frame, users_of
from workshop.watch.replay.film import Film

Facts = dict[str, int | str]
Cell = tuple[str, str, int, int]  # request, kind, start, number of tokens


class NotShown(ValueError):
    """The film does not show what its caption is about."""


def _require(is_shown: object, what: str) -> None:
    if not is_shown:
        raise NotShown(f"the film does not show {what}")


def happened(film: Film, name: str) -> Iterator[tuple[int, Any]]:
    """Yield everything of one name that `frames.happened` finds, each with its step: plans,
    results, items of a list, or pairs of a request and its blocks."""
    for step in film.steps():
        for what in step.happened:
            found = what[name]
            if name in ("plan", "result"):
                found = [] if found is None else [found]
            for item in found.items() if isinstance(found, dict) else found:
                yield step.number, item


def first(film: Film, name: str, is_it: Callable[[int, Any], object], what: str) -> tuple[int, Any]:
    found = next((pair for pair in happened(film, name) if is_it(*pair)), None)
    if found is None:
        raise NotShown(f"the film does not show {what}")
    return found


def _admitted(film: Film, name: str, after: int = -1) -> int:
    """The step after this one in which the request is admitted."""
    is_it = lambda at, item: at > after and item[0] == name  # noqa: E731
    return first(film, "admitted", is_it, f"the admission of {name!r}")[0]


def cells(film: Film) -> list[list[Cell]]:
    """Return the cells that each step computed."""
    return [step.cells() for step in film.steps()]


def _table(frame: Frame, name: str, group: int = 0) -> list[int]:
    return frame["tables"].get(name, {}).get(str(group), [])


def _listed(blocks: Sequence[int]) -> str:
    return ", ".join(map(str, blocks))


def _outputs(film: Film) -> dict[str, list[int]]:
    return {name: row["outputs"] for name, row in film.requests().items()}


def _check_same_answers(films: Sequence[Film]) -> None:
    first_answers, *others = map(_outputs, films)
    _require(all(answers == first_answers for answers in others), "the same tokens in both runs")


def a_little_of_everything(film: Film) -> Facts:
    """A cache hit, a preemption, the preempted request's return, accepted draft tokens."""
    requests = film.requests()
    step, (victim, num_lost, beneficiary) = first(
        film, "preempted", lambda _, item: item[2], "a preemption"
    )
    late = _admitted(film, victim, after=step)
    hit, (newcomer, num_found, _) = first(
        film, "admitted", lambda _, item: item[1] and not item[2], "a new request's cache hit"
    )
    guess, result = first(film, "result", lambda _, one: _accepted(one), "accepted draft tokens")
    lucky = _accepted(result)[0]
    return {
        "num_requests": len(requests),
        "num_seats": film.run.max_num_seqs,
        "num_blocks": film.run.num_blocks - 1,
        "block_size": film.run.block_size,
        "budget": film.run.max_num_batched_tokens,
        "step": step,
        "victim": victim,
        "taker": beneficiary,
        "num_preempted_tokens": num_lost,
        "late": late,
        "hit": hit,
        "newcomer": newcomer,
        "num_found": num_found,
        "guess": guess,
        "lucky": lucky,
        "num_right": result["verified"][lucky][0],
    }


def _accepted(result: dict[str, Any]) -> list[str]:
    """The requests of which a step accepted all draft tokens."""
    return [name for name, (a, r) in result.get("verified", {}).items() if a and not r]


def static_and_continuous(static: Film, continuous: Film) -> Facts:
    _check_same_answers([static, continuous])
    end, ended = first(static, "finished", lambda *_: True, "that a request ends")
    running = static.state_after(end + 1)["running"]
    longest = max(running, key=lambda name: _end_of(static, name))
    joined, (name, *_) = first(
        continuous, "admitted", lambda step, _: step > 0, "that a request joins a running batch"
    )
    _require(joined == end + 1 and name != ended, "a slot that is used")
    late = _admitted(static, name)
    for step in range(joined, late):
        reason = static.step(step).reasons.get(name)
        _require(reason == "constraint", f"that {name!r} waits for the batch in step {step}")
    _require(late == _end_of(static, longest) + 1, f"that {name!r} waits for {longest!r}")
    return {
        "ended": ended,
        "end": end,
        "joined": joined,
        "newcomer": name,
        "longest": longest,
        "late": late,
        "num_requests": len(static.requests()),
        "num_seats": static.run.max_num_seqs,
        "static_steps": static.num_steps,
        "continuous_steps": continuous.num_steps,
    }


def _end_of(film: Film, name: str) -> int:
    return first(film, "finished", lambda _, one: one == name, f"the end of {name!r}")[0]


def reserved_tables(film: Film) -> Facts:
    """Blocks for the maximum length are allocated at admission, so that a request waits for blocks
    while allocated ones are still empty."""
    size = film.run.block_size
    step, plan = first(
        film, "plan", lambda _, one: one.get("stop", [""])[0] == "blocks", "a wait for blocks"
    )
    name = plan["stop"][1]
    state = film.state_after(step)
    num_free, computed = len(state["free"]), state["computed"]
    num_empty = sum(len(_table(state, one)) + -computed[one] // size for one in state["running"])
    late = _admitted(film, name)
    table = _table(film.state_after(late), name)
    gone, left = first(film, "finished", lambda at, _: at == late - 1, "which request ends")
    given_back = _table(film.state_after(gone - 1), left)
    _require(set(table) & set(given_back), "a block in a second table")
    _require(any(a + 1 != b for a, b in pairwise(table)), "a table that is not in order")
    begun = {name for _, (name, *_) in happened(film, "admitted")}
    taken = [name for _, (name, _) in happened(film, "taken")]
    _require(sorted(begun) == sorted(taken), "that no table grows")
    a, owner = next(iter(film.requests().items()))
    return {
        "a": a,
        "begin": 0,
        "num_prompt": len(owner["prompt"]),
        "num_tokens": len(owner["prompt"]) + owner["max_tokens"] - 1,
        "num_all": len(_table(film.state_after(0), a)),
        "num_filled": -(-len(owner["prompt"]) // size),
        "block_size": size,
        "step": step,
        "c": name,
        "num_needed": len(table),
        "num_free": num_free,
        "num_empty": num_empty,
        "late": late,
        "b": left,
        "table": _listed(table),
        "first": table[0],
    }


def shared_prefix(film: Film) -> Facts:
    """A match of the start of a block chain; later its end is evicted and its start still found."""
    _require(film.run.prefix_cache == "hash", "a chain of hashes")
    step, (name, trunk) = first(film, "shared", lambda *_: True, "a match")
    others = [other for other in users_of(film.state_after(step), trunk[0]) if other != name]
    _require(others, "another request with these blocks")
    owner = others[0]
    own = _table(film.state_after(_end_of(film, owner) - 1), owner)[len(trunk) :]
    cached = film.state_after(step)["cached"]
    _require(cached[str(own[0])]["parent"] == trunk[-1], f"a block of {owner!r} after the shared")
    late, _ = first(film, "evicted", lambda *_: True, "an eviction")
    back, (again, _) = first(
        film, "shared", lambda at, item: at > late and item[1] == trunk, "a match of what is left"
    )
    kept = film.state_after(_end_of(film, owner))["cached"]
    own = [block for block in own if str(block) in kept]  # full ones
    gone = [(at, block) for at, block in happened(film, "evicted") if at < back]
    _require([block for _, block in gone] == own[::-1], f"that {owner!r}'s end goes, last first")
    row = film.requests()[name]
    prompt, num_cached = len(row["prompt"]), row["num_cached"]
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
        "c": again,
    }


def preemption_and_return(film: Film) -> Facts:
    step, (name, num_lost, beneficiary) = first(film, "preempted", lambda *_: True, "a preemption")
    before = film.state_after(step - 1)
    table = _table(before, name)
    _require(not before["free"], "that no block is free")
    _require(before["running"][-1] == name, "that the last admitted is the victim")
    _, (_, blocks) = first(
        film, "taken", lambda at, item: (at, item[0]) == (step, beneficiary), "who gets a block"
    )
    _require(beneficiary != name, "that the block is for another")
    _require(set(blocks) <= set(table), "that the victim's blocks are used immediately")
    counts = [row["num_preemptions"] for row in film.requests().values()]
    _require(max(counts) == 1, "that no request is preempted twice")
    late = _admitted(film, name, after=step)
    again = sum(
        num for one, kind, _, num in cells(film)[late] if (one, kind) == (name, "recomputed")
    )
    _require(again == num_lost, "that what was lost is computed again")
    for at in range(step, late):
        reason, why = film.step(at).reasons.get(name), "blocks" if at > step else "preempting"
        _require(reason == why, f"that {name!r} waits for blocks in step {at}")
    return {
        "step": step,
        "victim": name,
        "taker": beneficiary,
        "num_all": film.run.num_blocks - 1,
        "num_blocks": len(table),
        "num_preempted_tokens": num_lost,
        "late": late,
        "num_waited": late - step,
    }


def guesses(plain: Film, guessing: Film) -> Facts:
    """A step that accepts all draft tokens of one request and rejects all of another."""
    _check_same_answers([plain, guessing])

    def is_both(_: int, result: dict[str, Any]) -> bool:
        counts = result.get("verified", {}).values()
        return any(a and not r for a, r in counts) and any(r and not a for a, r in counts)

    step, result = first(
        guessing, "result", is_both, "accepted and rejected draft tokens in one step"
    )
    verified, tokens = result["verified"], guessing.step(step).happened[-1]["tokens"]
    right = next(name for name, (_, rejected) in verified.items() if not rejected)
    wrong = next(name for name, (accepted, _) in verified.items() if not accepted)
    num_right, num_wrong = verified[right][0], verified[wrong][1]
    _require(len(tokens[right]) == num_right + 1, f"what {right!r} gains")
    _require(len(tokens[wrong]) == 1, f"that {wrong!r} loses nothing")
    return {
        "step": step,
        "right": right,
        "num_gained": num_right + 1,
        "wrong": wrong,
        "num_wrong": num_wrong,
        "plain_steps": plain.num_steps,
        "guessing_steps": guessing.num_steps,
    }


def long_prompt(whole: Film, pieces: Film) -> Facts:
    """The longest prompt, which `whole` computes in one step and `pieces` in several."""
    _check_same_answers([whole, pieces])
    requests = whole.requests()
    name = max(requests, key=lambda name: len(requests[name]["prompt"]))
    num_prompt = len(requests[name]["prompt"])
    of_whole, of_pieces = ([_prompt_of(step, name) for step in cells(f)] for f in (whole, pieces))
    step = next(i for i, n in enumerate(of_whole) if n)
    _require(of_whole[step] == num_prompt, f"that the prompt of {name!r} is computed whole")
    cut = [i for i, n in enumerate(of_pieces) if n]
    _require(cut[0] == step and len(cut) > 2, f"that the prompt of {name!r} comes in pieces")
    others = sorted(n for n in whole.state_after(step)["running"] if n != name)
    for at in cut:
        got = {one for one, kind, *_ in cells(pieces)[at] if kind == "decode"}
        _require(set(others) <= got, f"that the others go on in step {at}")
    return {
        "name": name,
        "num_prompt": num_prompt,
        "step": step,
        "others": " and ".join(others),
        "others_zh": "、".join(others),
        "num_whole": sum(num for *_, num in cells(whole)[step]),
        "num_most": max(sum(num for *_, num in step) for step in cells(pieces)),
        "num_pieces": len(cut),
        "size": of_pieces[step],
        "last": cut[-1],
    }


def _prompt_of(step: list[Cell], name: str) -> int:
    return sum(num for one, kind, _, num in step if (one, kind) == (name, "prompt"))


# -- of pages beyond the chapters


def mixed_adapters(film: Film) -> Facts:
    """Two requests with one prompt and different adapters; one that waits until another's adapter
    is unloaded."""
    requests = film.requests()
    base = next(name for name, row in requests.items() if not row["adapter"])
    prompt = requests[base]["prompt"]
    users = [name for name, row in requests.items() if row["adapter"] and row["prompt"] == prompt]
    _require(len(users) == 2, "two requests with one prompt and an adapter")
    owner, again = users
    texts = [requests[name]["outputs"] for name in (base, owner)]
    _require(texts[0] != texts[1], "a prompt with two texts")
    _require(not requests[owner]["num_cached"], f"that {owner!r} finds nothing")
    _require(requests[again]["num_cached"], f"that {again!r} finds something")
    step, name = _overtaken(film, "constraint")
    other = requests[name]["adapter"]
    held = {requests[one]["adapter"] for one in film.state_after(step)["running"]} - {""}
    _require(len(held) == film.run.config["max_loras"], "that all slots are taken")
    _require(other not in held, f"that {name!r} wants another adapter")
    late = _admitted(film, name)
    gone = max(_end_of(film, user) for user in users)
    _require(late == gone + 1, "that it begins when the slot is free")
    return {
        "a": base,
        "b": owner,
        "adapter": requests[owner]["adapter"],
        "f": again,
        "found": _admitted(film, again),
        "num_found": requests[again]["num_cached"],
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
    requests = film.requests()
    free = next(name for name, row in requests.items() if not row["grammar"])
    step, name = _overtaken(film, "grammar")
    grammar = requests[name]["grammar"]
    _require(requests[name]["prompt"] == requests[free]["prompt"], "two with one prompt")
    begun = {one: at for at, (one, *_) in happened(film, "admitted")}
    late, others = begun[name], [n for n, row in requests.items() if row["grammar"] == grammar]
    twin = next((n for n in others if n != name and begun[n] == late), None)
    _require(twin is not None, "two requests that wait for one grammar")
    for one in (name, twin or name):
        is_done = requests[one]["finish"]["reason"] == "stop"
        _require(_is_json(requests[one]["text"]) and is_done, f"that {one!r} is JSON")
    _require(not _is_json(requests[free]["text"]), "that a free text is none")
    arrived, _ = first(film, "arrived", lambda _, one: one == name, f"that {name!r} arrives")
    return {
        "a": free,
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
    step, name, gone = next(_released(film, windowed), (0, "", 0))
    _require(gone, "a table without its left")
    size = film.run.block_size
    for found, (finder, num, _) in happened(film, "admitted"):
        before, after = film.state_after(found - 1), film.state_after(found)
        seen = [b for b in _table(after, finder, windowed) if b and str(b) in before["cached"]]
        if num and seen:
            break
    else:
        raise NotShown("the film does not show a hit")
    _require(len(seen) < num // size, "that a window needs less")
    owner = users_of(before, seen[-1])[0]
    requests = film.requests()
    for lost, (loser, num_cached, _) in happened(film, "admitted"):
        prompt = requests[loser]["prompt"]
        num_there = [_num_known(film, lost - 1, prompt, group) for group in (0, windowed)]
        if not num_cached and num_there[0] > num_there[1]:
            break
    else:
        raise NotShown("the film does not show a prefix that holds in one group alone")
    return {
        "window": film.run.windows[windowed],
        "step": step,
        "a": name,
        "gone": gone,
        "found": found,
        "c": finder,
        "owner": owner,
        "num_found": num,
        "num_all": num // size,
        "num_seen": len(seen),
        "first_seen": seen[0],
        "lost": lost,
        "e": loser,
        "num_there": num_there[0] * size,
    }


def _released(film: Film, group: int) -> Iterator[tuple[int, str, int]]:
    """Yield blocks that left the start of a request's table while it ran: step, request, block."""
    for step in film.steps():
        for _, before, after in step.frames:
            for name in after["tables"]:
                pairs = zip(_table(before, name, group), _table(after, name, group))
                yield from ((step.number, name, block) for block, now in pairs if block and not now)


def _num_known(film: Film, step: int, prompt: list[int], group: int) -> int:
    """The number of a prompt's leading blocks that can be found in a group after a step."""
    cached, size = film.state_after(step)["cached"].values(), film.run.block_size
    rows = [row for row in cached if row.get("group", 0) == group]
    known = {(row["place"], tuple(row["tokens"])) for row in rows}
    blocks = [tuple(prompt[i : i + size]) for i in range(0, len(prompt) - 1, size)]
    missing = (i for i, tokens in enumerate(blocks) if (i, tokens) not in known)
    return next(missing, len(blocks))


def _overtaken(film: Film, reason: str) -> tuple[int, str]:
    """The first step in which a later request starts before one that waits for this reason, and the
    waiting request's id."""
    order = list(film.requests())
    for number, (late, *_) in happened(film, "admitted"):
        for name, why in film.step(number).reasons.items():
            if why == reason and order.index(name) < order.index(late):
                return number, name
    raise NotShown(f"the film does not show which request is overtaken ({reason})")


def _overtaker(film: Film, step: int) -> str:
    return [name for at, (name, *_) in happened(film, "admitted") if at == step][-1]


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True
