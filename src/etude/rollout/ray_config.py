"""The Ray collector's config. Ray itself is imported when a collector is built."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from etude.core.contracts import BatchEnv, Collector, Policy
from etude.core.keys import Key
from etude.experience.segments import SegmentBuffer
from etude.rollout.elastic import ElasticCollector
from etude.rollout.host import Blueprint, Host
from etude.rollout.local import CollectorConfig, Workers
from etude.rollout.schedule import Patience, Schedule


class RayCollectorConfig(CollectorConfig):
    """Rollouts on the actors of a Ray cluster."""

    def check(self) -> None:
        from etude.rollout.ray import check

        check(self.address)

    def plan_text(self) -> str:
        actors = f"{self.actors:,}" if self.actors else "one per machine,"
        return f"on Ray actors: {actors} of {self.threads:,} threads, {self.address} cluster"

    def build(
        self,
        make_env: Callable[[], BatchEnv],
        make_policy: Callable[[], Policy],
        buffers: Sequence[SegmentBuffer],
        key: Key,
        workers: Workers,
        local: range,
        exact: bool,
    ) -> Collector:
        from etude.rollout.ray import RayFleet

        views = [[b.part(self.part(g)) for g in local] for b in buffers]
        one = replace(buffers[0].spec, num_envs=self.envs_per_group)
        blueprint = Blueprint(make_env, make_policy, one, key, self.threads)
        # Fragments of an iteration on their way, and those before them not yet let go of.
        room = 3 * buffers[0].spec.num_bytes
        fleet = RayFleet(blueprint, self.actors, self.address, room, exact)
        probe = Host(blueprint, workers).probe if exact else None
        schedule = Schedule(self.num_groups, self.threads, Patience(self.deadline))
        return ElasticCollector(fleet, schedule, views, probe, self.allow_inexact, workers.close)
