"""The world that `bench.scale` simulates: constants that are declared, not measured on the machine that runs it.

GPUs are H200s. Training speed is measured (`trainer-h200.json`) at 1.7B and goes with 1 / weights for the others, which
is the same share of the peak. Decoding is memory-bound: a step reads the weights and the attention cache of every
sequence at `READ_SHARE` of the GPU's bandwidth. Neither a trainer's collectives nor prefills are modelled.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from bench.scale_costs import PartCosts, recorded

BANDWIDTH = 4.8e12  # bytes a second of an H200's memory
READ_SHARE = 0.6
STEP_OVERHEAD = 1e-3  # seconds of a decode step besides reading: launches, sampling
NETWORK = 25e9  # bytes a second of a GPU's share of its host's network: 200 Gbit/s
ROUND_TRIP = 2e-4
GPUS_PER_HOST = 8
NODES_PER_RELAY = 64
TOKEN_BYTES = 21  # of the six columns that a trained token has


@dataclass(frozen=True)
class Model:
    name: str
    weights: float
    cache: int  # bytes of attention cache of one token
    engine_gpus: int  # that one copy for decoding is spread over


MODELS = {
    model.name: model
    for model in (
        Model("1.7B", 1.7e9, 28 * 8 * 128 * 4, 1),
        Model("8B", 8.2e9, 36 * 8 * 128 * 4, 1),
        Model("32B", 32.8e9, 64 * 8 * 128 * 4, 4),
    )
}


@dataclass(frozen=True)
class Work:
    """Episodes: lengths are log-normal and cut; after every turn but the last a tool takes its time."""

    turns: int = 2
    mean_tokens: float = 2000.0  # sampled in an episode
    sigma: float = 0.7  # standard deviation of the logarithm
    most_tokens: float = 6_000.0
    given_tokens: int = 1000  # of prompt and tools
    tool_seconds: float = 1.0  # mean, exponential


@dataclass(frozen=True)
class Device:
    """What the GPUs take. A decode step of b sequences takes `step + b * sequence` seconds."""

    step: float
    sequence: float
    train_rate: float  # tokens a second of one rank
    encode: float = 0.0  # of a version, beside training
    pause: float = 0.0  # of an engine that takes a version
    delta: float = 0.0  # bytes of a version


@dataclass(frozen=True)
class World:
    """One run. A node has `engines`, each with `slots` slots. `units` hold the payload; with `central` one process
    has all of the ledger's and the units' work, and trainers wait for it, as with a single controller."""

    nodes: int
    ranks: int
    groups: int
    device: Device
    work: Work = Work()
    group_size: int = 8
    staleness: int = 8
    slots: int = 64
    engines: int = 1
    units: int = 1
    relays: int = 1
    heartbeat: float = 2.0
    central: bool = False

    @property
    def window(self) -> int:
        return (self.staleness + 1) * self.groups

    @property
    def capacity(self) -> int:
        """Episodes that a node plays at once."""
        return self.slots * self.engines


def device_of(model: Model, parts: PartCosts, work: Work) -> Device:
    """A model on H200s."""
    read = BANDWIDTH * READ_SHARE * model.engine_gpus
    context = work.given_tokens + work.mean_tokens / 2 * (1 + work.sigma**2)  # long episodes take longer
    small = MODELS["1.7B"]
    rate = recorded("trainer-h200", "1.7b: tokens a second") * small.weights / model.weights
    size = 2 * model.weights
    return Device(
        step=STEP_OVERHEAD + size / read,
        sequence=context * model.cache / read,
        train_rate=rate,
        encode=size * parts.encode_byte,
        pause=size / model.engine_gpus * parts.apply_byte,
        delta=model.weights * parts.delta_share,
    )


def world_of(gpus: int, model: Model, parts: PartCosts, rollout_gpus: int, work: Work | None = None) -> World:
    """Return a run on `gpus` GPUs, of which `rollout_gpus` sample. The batch grows with the GPUs (weak scaling)."""
    work = work or Work()
    nodes = max(1, rollout_gpus // model.engine_gpus)
    return World(
        nodes=nodes,
        ranks=max(1, gpus - nodes * model.engine_gpus),
        groups=max(8, round(1.6 * gpus / model.engine_gpus)),
        device=device_of(model, parts, work),
        work=work,
        units=max(1, gpus // GPUS_PER_HOST),
        relays=max(1, -(-nodes // NODES_PER_RELAY)),
    )


def centralised(world: World) -> World:
    """The same run with one process between all others, through which all the bytes pass."""
    return replace(world, central=True, units=1)


def by_host(world: World) -> World:
    """Return the same run with one node for the engines of a host."""
    engines = max(1, min(GPUS_PER_HOST, world.nodes))
    nodes = max(1, world.nodes // engines)
    return replace(world, nodes=nodes, engines=world.nodes // nodes, relays=max(1, -(-nodes // NODES_PER_RELAY)))
