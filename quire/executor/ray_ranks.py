"""Ranks where Ray puts them. Ray places them, and says when one has died; plans, sums and tokens never go through it.
Ray itself hears of a lost node by health checks that take 15 s and more, so nodes are looked at here.

A rank is an actor with one call, which lasts as long as the rank does: the same loop that a process of this machine
runs (rank_process.py). The ranks of a stage share a machine where they fit, and stages are spread over machines.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import quire
from quire.config import EngineConfig
from quire.errors import ConfigError, RankError, install_hint
from quire.executor.rank_messages import RankLaunch, encode_launch
from quire.executor.rank_watch import Cause, RankWatch
from quire.log import get_logger

PLACE_S = 60.0  # for Ray to find room
_LOOK_S = 0.3
_CONNECT_S = 1.0


class RayRanks:
    """Joins the cluster of RAY_ADDRESS or one that runs on this machine; else starts one of its own."""

    def __init__(self, config: EngineConfig) -> None:
        try:
            import ray
        except ImportError as error:
            needs = f"distributed_executor_backend='ray' needs Ray: {install_hint('ray')}"
            raise ConfigError(needs) from error
        self._ray: Any = ray
        self._tensor_size, self._num_stages = config.tensor_parallel_size, config.pipeline_parallel_size
        self._is_ours = not ray.is_initialized()
        if self._is_ours:
            self._connect(self._tensor_size * self._num_stages * (config.num_threads or 1))
        self._each: dict[str, int] = {"CPU": config.num_threads or 1}  # what a rank needs
        if config.device != "cpu" and self._ray.cluster_resources().get("GPU", 0):
            self._each["GPU"] = 1
        self.host: str = self._ray.util.get_node_ip_address()
        self._group: Any = None
        self._actors: list[Any] = []
        self._refs: list[Any] = []
        self._node_of: list[str] = []  # by rank
        self._is_closing = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, launches: list[RankLaunch], watch: RankWatch) -> None:
        bundles = self._place()
        self._node_of = [bundles[self._bundle_of(launch.rank)] for launch in launches]
        watch.describe_with(lambda rank: f"Ray's node {self._node_of[rank][:8]}")  # until it says more of itself
        ranks_on = Counter(self._node_of)
        actor = self._ray.remote(_actor_class())
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        root = str(Path(quire.__file__).parent.parent)
        for launch in launches:
            num_ranks = ranks_on[self._node_of[launch.rank]]
            # Ray shows an actor its own GPUs only.
            launch = replace(launch, local_rank=0, num_ranks_on_host=num_ranks, store="tcp:")
            strategy = PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=self._bundle_of(launch.rank)
            )
            options = {"max_restarts": 0, "scheduling_strategy": strategy}
            options |= {"num_cpus": self._each["CPU"], "num_gpus": self._each.get("GPU", 0)}
            self._actors.append(actor.options(**options).remote())
            self._refs.append(self._actors[-1].host.remote(root, encode_launch(launch)))
        self._thread = threading.Thread(target=self._listen, args=(watch,), name="quire-ray-watch", daemon=True)
        self._thread.start()

    def stop(self, within_s: float) -> None:
        self._is_closing.set()
        if self._refs:
            with contextlib.suppress(Exception):
                self._ray.wait(self._refs, num_returns=len(self._refs), timeout=within_s)
        self.kill()
        if self._thread is not None and threading.current_thread() is not self._thread:
            self._thread.join()
        if self._is_ours:
            self._is_ours = False
            self._ray.shutdown()

    def kill(self) -> None:
        self._is_closing.set()
        actors, self._actors = self._actors, []
        for actor in actors:
            with contextlib.suppress(Exception):  # it is gone, or Ray is
                self._ray.kill(actor)
        if self._group is not None:
            with contextlib.suppress(Exception):
                self._ray.util.remove_placement_group(self._group)
            self._group = None

    def _connect(self, num_cpus: int) -> None:
        ray, address = self._ray, os.environ.get("RAY_ADDRESS")
        quiet = {"log_to_driver": False, "logging_level": "warning"}
        try:
            ray.init(address=address or "auto", **quiet)
            return
        except ConnectionError as error:
            if address:
                raise RankError(
                    f"RAY_ADDRESS={address} cannot be reached ({error}): start a cluster there with `ray start`, or "
                    "unset it to have one started here"
                ) from error
        except RuntimeError as error:  # another Ray or Python than the cluster's
            raise RankError(f"the Ray cluster cannot be joined: {error}") from error
        get_logger().info("no Ray cluster runs here: one is started for this engine")
        ray.init(num_cpus=max(num_cpus, os.cpu_count() or 1), include_dashboard=False, **quiet)

    def _place(self) -> list[str]:
        """Have Ray place the bundles. Returns the node of each."""
        per_stage = self._num_stages > 1
        bundle = {kind: each * (self._tensor_size if per_stage else 1) for kind, each in self._each.items()}
        count = self._num_stages if per_stage else self._tensor_size
        there = self._ray.cluster_resources()
        for kind, each in self._each.items():
            if (total := there.get(kind, 0)) < bundle[kind] * count:
                raise ConfigError(
                    f"Ray's cluster has {total:g} {kind}s, and {self._tensor_size * self._num_stages} ranks need "
                    f"{each} each: add nodes, lower num_threads, or split the model among fewer"
                )
        strategy = "SPREAD" if per_stage else "PACK"
        self._group = self._ray.util.placement_group([bundle] * count, strategy=strategy)
        if not self._group.wait(PLACE_S):
            free = self._ray.available_resources()
            self.kill()
            wanted = " and ".join(f"{size} {kind}s" for kind, size in bundle.items())
            left = ", ".join(f"{free.get(kind, 0):g} of {there[kind]:g} {kind}s" for kind in bundle)
            raise RankError(
                f"Ray found no room for {count} × {wanted} in {PLACE_S:g} s, {left} are free: end what runs there, add "
                "nodes, or lower num_threads"
            )
        found = self._ray.util.placement_group_table(self._group)["bundles_to_node_id"]
        return [found[index] for index in range(count)]

    def _bundle_of(self, rank: int) -> int:
        return rank // self._tensor_size if self._num_stages > 1 else rank

    def _listen(self, watch: RankWatch) -> None:
        """An actor's call ends when its rank does, and a rank is lost with its node: those of a node that was killed
        run on for a few seconds as if nothing had happened."""
        waiting = {ref: rank for rank, ref in enumerate(self._refs)}
        raylets: dict[str, tuple[str, int]] = {}
        while waiting and not self._is_closing.is_set():
            try:
                if not raylets:
                    found = {node["NodeID"]: node for node in self._ray.nodes()}
                    where = {id_: found[id_] for id_ in set(self._node_of)}
                    raylets = {id_: (n["NodeManagerAddress"], n["NodeManagerPort"]) for id_, n in where.items()}
                done, _ = self._ray.wait(list(waiting), timeout=_LOOK_S)
            except Exception as error:
                watch.report(0, Cause.FAILED, f"cannot be asked for, Ray says: {error}")
                return
            for id_, address in list(raylets.items()):
                if _is_refused(address) and not self._is_closing.is_set():
                    text = f"is lost with its node: Ray's raylet there, {address[0]}:{address[1]}, has ended"
                    watch.report(self._node_of.index(id_), Cause.KILLED, text)
                    return
            for ref in done:
                rank = waiting.pop(ref)
                if self._is_closing.is_set():
                    return
                try:
                    status = self._ray.get(ref)
                    watch.report(rank, Cause.ENDED, f"exited with status {status}")
                except Exception as error:
                    text = " ".join(str(error).split())[:400]
                    watch.report(rank, Cause.KILLED, f"died, Ray says: {type(error).__name__}: {text}")


def _is_refused(address: tuple[str, int]) -> bool:
    """Whether nobody listens there. A machine that does not answer at all is left to its heartbeats: it may be slow."""
    try:
        socket.create_connection(address, _CONNECT_S).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return False


def _actor_class() -> type:
    class RankActor:
        """Made here so that Ray sends it as it is: the worker finds the same Quire by it, where there is that path."""

        def host(self, root: str, launch: bytes) -> int:
            import dataclasses
            import os
            import platform
            import sys

            if os.path.isdir(root):
                sys.path.insert(0, root)
            import ray

            from quire.executor.rank_messages import decode_launch
            from quire.executor.rank_process import host_rank, use_interface_of

            address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
            use_interface_of(address)
            node: str = ray.get_runtime_context().get_node_id()
            place = f"{platform.node()}, Ray's node {node[:8]} at {address}"
            return host_rank(dataclasses.replace(decode_launch(launch), store=f"tcp:{address}", place=place))

    return RankActor
