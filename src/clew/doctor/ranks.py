"""Several ranks against each other: weights, gradients and batches by their hashes, phases by their times."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from clew.doctor.measure import round_number
from clew.doctor.rule import Found, NotJudged, rule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from clew.doctor.case import Case

    Hashes = dict[int, dict[int, int]]

_PHASES: Final = ("data", "forward", "optimizer", "rest")
"""Phases in which a rank works for itself; in backward the fast ones wait for the slow."""


def _hashes(case: Case, kind: str) -> Hashes:
    """Return the hash of every trainable site by step, of the steps that are kept."""
    rows = case.rows(kind, mode=None)
    found: Hashes = {}
    if rows.hashes is None:
        return found
    for step, site, number in zip(
        rows.steps.tolist(), rows.sites.tolist(), rows.hashes.tolist(), strict=True
    ):
        known = case.sites.get(site)
        if known is not None and known.trainable:
            found.setdefault(step, {})[site] = number
    return found


def _compare(case: Case, kind: str) -> dict[int, tuple[int, int, int]]:
    """Return, by step, how many sites all ranks have, how many differ, and the first that does."""
    ranks = [_hashes(peer, kind) for peer in case.peers]
    result: dict[int, tuple[int, int, int]] = {}
    for step in sorted(set.intersection(*(set(each) for each in ranks))):
        shared = [site for site in ranks[0][step] if all(site in each[step] for each in ranks)]
        differing = [site for site in shared if len({each[step][site] for each in ranks}) > 1]
        if shared:
            result[step] = (len(shared), len(differing), differing[0] if differing else -1)
    return result


def _weights(case: Case) -> dict[int, tuple[int, int, int]]:
    found: dict[int, tuple[int, int, int]] = case.remember(
        "rank weights", lambda each: _compare(each, "param")
    )
    return found


def _gradients(case: Case) -> dict[int, tuple[int, int, int]]:
    found: dict[int, tuple[int, int, int]] = case.remember("rank grads", lambda each: _compare(each, "grad"))
    return found


def _require_replicas(case: Case) -> dict[int, tuple[int, int, int]]:
    """Return the comparison of weights; raises for a run whose ranks were never copies of one model."""
    weights = _weights(case)
    if not weights:
        raise NotJudged("the ranks have no recorded step in common")
    shared, differing, _ = weights[min(weights)]
    if differing == shared:
        gradients = _gradients(case)
        if not any(count and not wrong for count, wrong, _ in gradients.values()):
            raise NotJudged("the ranks hold different weights from the start: shards, or models of their own")
    return weights


@rule(
    "X01",
    "replicas-diverge",
    severity="error",
    scope="run",
    watches="hashes of the weights of all ranks, step by step",
    threshold="weights that were equal differ, and stay different",
    silent="replicas of DistributedDataParallel are equal bit for bit; shards and local training are left out",
    hint="every rank must apply the same update: broadcast the weights again and look at what this rank does alone",
    needs=("ranks:2", "hashes", "kind:param"),
)
def replicas_diverge(case: Case) -> Iterator[Found]:
    """The ranks' weights drift apart."""
    weights = _require_replicas(case)
    steps = sorted(weights)
    wrong = [step for step in steps if weights[step][1]]
    if not wrong or len([step for step in steps if step >= wrong[0]]) < 2 or not weights[steps[-1]][1]:
        return
    # Ranks that train apart and meet again now and then do so on purpose.
    if any(not weights[step][1] for step in steps if step > wrong[0]):
        return
    shared, differing, site = weights[wrong[0]]
    yield Found(
        wrong[0],
        site=case.name(site),
        evidence={"differing": differing, "of": shared, "odd_ranks": _odd_ranks(case, wrong[0], site)},
    )


def _odd_ranks(case: Case, step: int, site: int) -> list[int]:
    """Return the ranks that do not hold what most hold."""
    held = {peer.rank: _hashes(peer, "param").get(step, {}).get(site, 0) for peer in case.peers}
    values = list(held.values())
    common = max(values, key=values.count)
    return [rank for rank, value in held.items() if value != common]


@rule(
    "X02",
    "gradients-not-synchronised",
    severity="error",
    scope="run",
    watches="hashes of the gradients of all ranks at the optimizer's step",
    threshold="gradients of equal weights differ between ranks in 3 steps",
    silent="DistributedDataParallel leaves equal gradients; no_sync ends before the step",
    hint="call the DistributedDataParallel wrapper, not the model in it; clip and edit gradients on every rank alike",
    needs=("ranks:2", "hashes", "kind:grad"),
    explains=("X01",),
)
def gradients_not_synchronised(case: Case) -> Iterator[Found]:
    """Gradients differ between ranks when the optimizer steps."""
    weights, gradients = _require_replicas(case), _gradients(case)
    wrong = [step for step in sorted(gradients) if gradients[step][1]]
    if len(wrong) < min(3, len(gradients)) or not wrong or weights.get(wrong[0], (0, 0, 0))[1]:
        return
    if any(not weights[step][1] for step in weights if step > wrong[0] + 1):
        return
    shared, differing, site = gradients[wrong[0]]
    yield Found(
        wrong[0], site=case.name(site), evidence={"differing": differing, "of": shared, "steps": len(wrong)}
    )


@rule(
    "X03",
    "ranks-see-same-data",
    severity="error",
    scope="run",
    watches="fingerprints of the batches of all ranks",
    threshold="the same batch on two ranks in 3 steps, where the ranks are replicas",
    silent="ranks that share a model's parts (tensor or pipeline parallel) hold different weights and are left out",
    hint="give the DataLoader a DistributedSampler, or seed each rank's data differently",
    needs=("ranks:2", "hashes", "batches"),
)
def ranks_see_same_data(case: Case) -> Iterator[Found]:
    """Ranks train on the same batches."""
    _require_replicas(case)
    seen = [_fingerprints(peer) for peer in case.peers]
    for first in range(len(seen)):
        for second in range(first + 1, len(seen)):
            common = sorted(seen[first].keys() & seen[second].keys())
            same = [key for key in common if seen[first][key] == seen[second][key]]
            if len({step for step, _ in same}) >= 3 and len(same) == len(common):
                step, leaf = same[0]
                pair = [case.peers[first].rank, case.peers[second].rank]
                yield Found(step, site=leaf, evidence={"ranks": pair, "equal_batches": len(same)})
                return


def _fingerprints(case: Case) -> dict[tuple[int, str], int]:
    """Return the fingerprints of training batches that hold enough to tell batches apart."""
    rows = case.rows("batch")
    is_telling = (rows.stat("count") >= 16) & (rows.stat("min") < rows.stat("max"))
    telling = set(zip(rows.steps[is_telling].tolist(), rows.sites[is_telling].tolist(), strict=True))
    numbers = {site.name: site.id for site in case.sites.values()}
    return {
        (step, batch.leaf): batch.fingerprint
        for step, batch in case.batches
        if batch.fingerprint
        and not batch.mode
        and not batch.ordinal
        and (step, numbers.get(batch.leaf, -1)) in telling
    }


@rule(
    "X04",
    "set-epoch-missing",
    severity="warning",
    watches="indices of the samples of a batch, epoch by epoch, in runs of several ranks",
    threshold="a shuffled order that is the same in two epochs",
    silent="data in its natural order repeats by right, and so does a run of one rank",
    hint="call sampler.set_epoch(epoch) at the start of every epoch",
    needs=("batches",),
)
def set_epoch_missing(case: Case) -> Iterator[Found]:
    """The distributed sampler shuffles every epoch alike."""
    if case.info is None or case.info.world_size < 2:
        raise NotJudged("the run has one rank")
    passes: dict[tuple[str, int], list[tuple[int, tuple[int, ...]]]] = {}
    for step, batch in case.batches:
        if not batch.mode and len(batch.indices) > 3:
            known = passes.setdefault((batch.leaf, batch.position), [])
            if not known or known[-1][0] != step:
                known.append((step, batch.indices))
    repeated = [seen for seen in passes.values() if len(seen) > 1 and len({each for _, each in seen}) == 1]
    several = [seen for seen in passes.values() if len(seen) > 1]
    if several and len(repeated) == len(several) and any(_is_shuffled(seen[0][1]) for seen in repeated):
        yield Found(
            repeated[0][1][0],
            evidence={"equal_batches": len(repeated), "indices": list(repeated[0][0][1][:8])},
        )


def _is_shuffled(indices: tuple[int, ...]) -> bool:
    return any(after < before for before, after in pairwise(indices))


@rule(
    "X05",
    "uneven-collectives",
    severity="error",
    scope="run",
    watches="how many batches the loaders of all ranks have, and how many steps the ranks took",
    threshold="loaders of one number that differ in length; ranks that end with different numbers of steps",
    silent="DistributedSampler gives every rank as many batches; a run that was stopped is left out",
    hint="use DistributedSampler with drop_last=True, or torch.distributed.algorithms.Join",
    needs=("ranks:2",),
    explains=("X01", "X02"),
)
def uneven_collectives(case: Case) -> Iterator[Found]:
    """Ranks have different numbers of batches: one waits for the others for ever."""
    lengths: dict[int, dict[int, int]] = {}
    for peer in case.peers:
        for note in peer.noted("loader"):
            if note["batches"] >= 0:
                lengths.setdefault(int(note["number"]), {})[peer.rank] = int(note["batches"])
    for number, by_rank in sorted(lengths.items()):
        if len(by_rank) == len(case.peers) and len(set(by_rank.values())) > 1:
            yield Found(0, evidence={"batches_by_rank": list(by_rank.values()), "loader": number})
            return
    steps = [peer.steps for peer in case.peers]
    if all(peer.ended and not peer.died for peer in case.peers) and len(set(steps)) > 1:
        yield Found(min(steps), evidence={"steps_by_rank": steps})


@rule(
    "X06",
    "straggler",
    severity="warning",
    scope="run",
    watches="the time each rank spends on its own work: data, forward, optimizer, rest",
    threshold="one rank takes over 1.5 times as long as the median, by 5 ms and 10 % of a step, over 20 steps",
    silent="equal machines with equal work are within a few per cent",
    hint="look at that rank's data, machine and logging",
    needs=("ranks:2", "steps:20"),
)
def straggler(case: Case) -> Iterator[Found]:
    """One rank is late and the others wait for it."""
    own = [_median_times(peer) for peer in case.peers]
    sums = [sum(times.values()) for times in own]
    slowest = int(np.argmax(sums))
    others = [value for rank, value in enumerate(sums) if rank != slowest]
    typical = float(np.median(others))
    late = sums[slowest] - typical
    step = (
        typical + float(np.median(case.scalar("time.backward").values))
        if len(case.scalar("time.backward"))
        else typical
    )
    if sums[slowest] > 1.5 * typical and late > max(0.005, 0.1 * step):
        phase = max(
            _PHASES, key=lambda name: own[slowest][name] - float(np.median([each[name] for each in own]))
        )
        yield Found(
            0,
            evidence={
                "late_rank": case.peers[slowest].rank,
                "phase": phase,
                "own_seconds": round_number(sums[slowest]),
                "median_seconds": round_number(typical),
            },
        )


def _median_times(case: Case) -> dict[str, Any]:
    """Return the median seconds of each phase, the first steps left out."""
    return {
        phase: float(np.median(values[2:])) if len(values := case.scalar(f"time.{phase}").values) > 2 else 0.0
        for phase in _PHASES
    }
