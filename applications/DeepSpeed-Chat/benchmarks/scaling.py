# SPDX-License-Identifier: Apache-2.0
"""How long would an iteration of step 3 take on 1 to 64 GPUs, and how much data would move? Computed, not measured.

Four models of one size; one update per rollout, prompts and responses of full length. Responses are sampled by the
built-in engine, by vLLM inside the training processes, by vLLM servers elsewhere, or by servers one rollout ahead.
`dschat.plan` decides which layouts fit, and has the sizes of the models; the fastest layout counts. Speeds come from
`Assumptions`, each of which is a flag and names its source; --measured takes them from files of gpu.py (PIECE.json).

Simplifications: two operations per weight and token in a forward pass, none for attention; all weights are read in
every decoding step; responses are spread evenly; no process waits for a slower one; the optimizer's step is free.
"""

import argparse
import dataclasses
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from transformers import AutoConfig

from dschat.base.atomic import write_file
from dschat.base.errors import UserError
from dschat.plan.models import LLAMA31_70B, published_config
from dschat.plan.passes import shape_of
from dschat.plan.phases import Machine
from dschat.plan.plan import Plan, make_plan
from dschat.plan.states import Weights
from dschat.settings.parse import parse
from dschat.settings.ppo import PPOConfig
from harness import GB, origin, report_of, settings_parser, table, write_section

HUB_IDS = {"2B": "google/gemma-2b", "7B": "google/gemma-7b", "27B": "google/gemma-2-27b"}
SIZES = [*HUB_IDS, "70B"]
# Who samples the responses.
OWN = "built-in"
COLOCATED = "vLLM inside"
SERVERS = "servers"
AHEAD = "servers, one ahead"
WAYS = (OWN, COLOCATED, SERVERS, AHEAD)
NODE = 8  # GPUs of a node, as in a DGX H100
MOST_ROWS = 256  # rows that an engine generates at a time: vLLM's default
SLOTS = (128, 64, 32, 16, 8, 4)  # rows that the built-in engine may generate at a time
SHARES = (0.2, 0.25, 0.3, 0.4, 0.5, 0.7)  # shares of a GPU that vLLM may have inside the training processes
SERVER_MEMORY = 0.9  # share of a server's GPU for weights and cache: vLLM's default
COMMON_FLAGS = (
    "--actor_model_name_or_path a/model --critic_model_name_or_path a/model --data_path unnamed"
    " --output_dir planned/nowhere --overwrite_output_dir --gradient_checkpointing --dtype bf16"
)
VLLM_FLAGS = "--rollout_engine vllm"
NOT_COMPILED = "measured: 2B on one H200, layers not compiled"
Row = dict[str, float | str]


def assumed(value: float, unit: str, source: str = "assumed") -> float:
    """A field of `Assumptions`."""
    default: float = field(default=value, metadata={"unit": unit, "source": source})
    return default


@dataclass(frozen=True)
class Assumptions:
    """Speeds of a GPU, a node and the network; those of a GPU were measured on one of another kind."""

    memory: float = assumed(80e9, "bytes of a GPU", "published: H100")
    peak: float = assumed(801e12, "operations/s of a GPU, bf16", "published 989e12; 0.81 reached, measured on an H200")
    hbm: float = assumed(2.93e12, "bytes/s of a GPU's memory", "published 3.35e12; 7/8 reached, measured on an H200")
    own_decoding: float = assumed(0.3, "share of hbm while the built-in engine samples", NOT_COMPILED)
    vllm_decoding: float = assumed(0.45, "share of hbm while vLLM samples", "published: 0.3 to 0.6")
    prefill: float = assumed(0.54, "share of peak while prompts are read", "as scoring")
    scoring: float = assumed(0.54, "share of peak", NOT_COMPILED)
    training: float = assumed(0.38, "share of peak, with gradient checkpointing", NOT_COMPILED)
    nvlink: float = assumed(360e9, "bytes/s into a GPU inside a node", "published 450e9; 0.8 of it assumed")
    infiniband: float = assumed(40e9, "bytes/s into a node, per GPU", "published 50e9 (400 Gb/s); 0.8 of it assumed")
    http: float = assumed(1e9, "bytes/s of weights over HTTP")
    all_reduce: float = assumed(15e-6, "seconds of a tensor-parallel sum, two a layer and token")
    overlap: float = assumed(0.5, "share of the shorter of computing and moving that is hidden")


@dataclass(frozen=True)
class ClusterIteration:
    """An iteration on all GPUs together."""

    responses: int = 512
    prompt: int = 512  # tokens
    response: int = 512  # tokens
    micro_batch: int = 4  # responses of a training pass; a scoring pass has four times as many


# ---- Bytes and seconds ----


def push_bytes(actor: Weights) -> float:
    """Bytes that a sampler receives before every rollout: all of the actor's weights."""
    return actor.width * actor.parameters


def scoring_bytes(weights: Weights, processes: int, passes: int) -> float:
    """Bytes that a GPU receives while a model scores: at ZeRO 3 the weights of the others, in every pass."""
    if weights.zero.stage < 3:
        return 0
    return passes * weights.width * weights.parameters * (processes - 1) / processes


def training_bytes(weights: Weights, processes: int, passes: int) -> float:
    """Bytes that a GPU receives in one update of a model.

    ZeRO 3 gathers weights for each forward and each backward pass, and scatters sums of gradients after each; ZeRO 2
    scatters as often, and gathers weights once per update; lower stages sum gradients once, which counts twice.

    Args:
        weights: sizes of the model.
        processes: GPUs that train it.
        passes: micro-batches of the update.
    """
    whole = weights.width * weights.parameters
    trained = weights.width * weights.trained
    if weights.zero.stage == 3:
        moved = passes * (2 * whole + trained)
    elif weights.zero.stage == 2:
        moved = passes * trained + trained
    else:
        moved = 2 * weights.zero.gradient * weights.trained + trained
    return moved * (processes - 1) / processes


def moving_seconds(moved: float, processes: int, speeds: Assumptions) -> float:
    """Seconds in which each GPU receives some bytes from the others; data from other nodes enters a node once."""
    nodes = -(-processes // NODE)
    entering = moved * (1 - 1 / nodes) / (min(processes, NODE) * speeds.infiniband)
    return max(moved / speeds.nvlink, entering)


def together(computing: float, moving: float, speeds: Assumptions) -> float:
    """Seconds of computing and moving, which partly hide each other."""
    return max(computing, moving) + (1 - speeds.overlap) * min(computing, moving)


def step_seconds(
    weights: float, cache: float, operations: float, sums: int, parallel: int, share: float, speeds: Assumptions
) -> float:
    """Seconds of a decoding step of an engine.

    Args:
        weights: bytes of weights that are read, on all GPUs of the engine.
        cache: bytes of keys and values that are read, likewise.
        operations: operations of all rows.
        sums: tensor-parallel sums.
        parallel: GPUs of the engine.
        share: share of the memory bandwidth that decoding reaches.
        speeds: speeds of the GPUs.
    """
    reading = (weights + cache) / (parallel * speeds.hbm * share)
    computing = operations / (parallel * speeds.peak * speeds.prefill)
    summing = sums * speeds.all_reduce if parallel > 1 else 0
    return max(reading, computing) + summing


# ---- Layouts ----


@dataclass(frozen=True)
class GpuLayout:
    """A layout: which GPUs train, and which sample."""

    plan: Plan  # plan of the processes that train
    servers: int = 0  # GPUs that only sample
    parallel: int = 1  # GPUs of an engine
    slots: int = MOST_ROWS  # rows that an engine generates at a time

    @property
    def processes(self) -> int:
        """GPUs that train."""
        return self.plan.machine.processes

    @property
    def name(self) -> str:
        """The layout as the table shows it."""
        name = f"ZeRO {self.plan.roles[0].weights.zero.stage}"
        if self.servers:
            name = f"{self.processes} + {self.servers}, {name}"
        if self.parallel > 1:
            name += f", engines of {self.parallel}"
        return name


@cache
def make_layout_plan(
    name: str, processes: int, slots: int, flags: str, work: ClusterIteration, speeds: Assumptions
) -> Plan:
    """The plan of the processes that train, each of which generates some rows at a time."""
    rows = rows_of(processes, work)
    sizes = (
        f"--max_prompt_seq_len {work.prompt} --max_answer_seq_len {work.response}"
        f" --per_device_generation_batch_size {slots} --generation_batches {rows // slots}"
        f" --per_device_training_batch_size {work.micro_batch}"
        f" --gradient_accumulation_steps {rows // work.micro_batch}"
    )
    if name in HUB_IDS:
        model = published_config(HUB_IDS[name])
    else:
        model = AutoConfig.for_model("llama", **LLAMA31_70B)
    config = parse(PPOConfig, f"{COMMON_FLAGS} {sizes} {flags}".split(), runs_here=False)
    return make_plan(config, Machine(processes, int(speeds.memory), gpus_per_node=NODE), lambda path, flag: model)


def layouts(way: str, name: str, gpus: int, work: ClusterIteration, speeds: Assumptions) -> Iterator[GpuLayout]:
    """The layouts that fit."""
    for stage in (0, 2, 3):
        flags = f"--zero_stage {stage}"
        if way == OWN:
            yield from own_layouts(name, gpus, flags, work, speeds)
        elif way == COLOCATED:
            yield from colocated_layouts(name, gpus, flags, work, speeds)
        else:
            yield from server_layouts(name, gpus, flags, work, speeds)


def powers_of_two(most: int) -> list[int]:
    """1, 2, 4, … up to a number."""
    return [1 << exponent for exponent in range(most.bit_length())]


def own_layouts(name: str, gpus: int, flags: str, work: ClusterIteration, speeds: Assumptions) -> Iterator[GpuLayout]:
    """Layouts of the built-in engine, with different numbers of rows at a time."""
    for slots in SLOTS:
        if rows_of(gpus, work) % slots:
            continue
        plan = make_layout_plan(name, gpus, slots, flags, work, speeds)
        if plan.fits_device:
            yield GpuLayout(plan, slots=slots)


def colocated_layouts(
    name: str, gpus: int, flags: str, work: ClusterIteration, speeds: Assumptions
) -> Iterator[GpuLayout]:
    """vLLM inside the training processes, with different engines and shares of the memory."""
    for parallel in powers_of_two(min(gpus, NODE)):
        for share in SHARES:
            vllm = f"{VLLM_FLAGS} --vllm_tensor_parallel {parallel} --vllm_gpu_memory {share}"
            with suppress(UserError):  # the share does not hold the weights
                plan = make_layout_plan(name, gpus, rows_of(gpus, work), f"{flags} {vllm}", work, speeds)
                if plan.fits_device:
                    yield from with_rows(GpuLayout(plan, parallel=parallel), share, work, speeds)


def server_layouts(
    name: str, gpus: int, flags: str, work: ClusterIteration, speeds: Assumptions
) -> Iterator[GpuLayout]:
    """vLLM servers on different numbers of GPUs, with different engines."""
    for servers in powers_of_two(gpus - 1):
        vllm = f"{VLLM_FLAGS} --vllm_url http://SERVER:8000"
        plan = make_layout_plan(name, gpus - servers, work.micro_batch, f"{flags} {vllm}", work, speeds)
        if not plan.fits_device:
            continue
        for parallel in powers_of_two(min(servers, NODE)):
            yield from with_rows(GpuLayout(plan, servers, parallel), SERVER_MEMORY, work, speeds)


def with_rows(layout: GpuLayout, share: float, work: ClusterIteration, speeds: Assumptions) -> Iterator[GpuLayout]:
    """The layout with the most rows of full length that fit into an engine's memory beside the weights, if any fit."""
    room = share * speeds.memory - push_bytes(layout.plan.roles[0].weights) / layout.parallel
    row = (work.prompt + work.response) * token_bytes(layout, layout.parallel)
    rows = min(MOST_ROWS, int(room / row))
    if rows > 0:
        yield dataclasses.replace(layout, slots=rows)


# ---- Time ----


@dataclass(frozen=True)
class IterationCost:
    """Seconds of the parts of an iteration, and bytes."""

    push: float
    sample: float
    score: float
    train: float
    pushed: float  # bytes of the actor's weights
    moved: float  # bytes that a GPU receives while models score and train

    def seconds(self, ahead: bool) -> float:
        """Seconds of the iteration; with `ahead`, sampling runs while the models score and train."""
        learning = self.score + self.train
        if ahead:
            return self.push + max(self.sample, learning)
        return self.push + self.sample + learning


def iteration(layout: GpuLayout, way: str, work: ClusterIteration, speeds: Assumptions) -> IterationCost:
    """The cost of an iteration."""
    processes = layout.processes
    roles = layout.plan.roles
    actor = roles[0].weights
    trained = []
    for role in roles:
        if role.weights.trained:
            trained.append(role.weights)
    # With one update per rollout, trained models score in the passes of the update.
    scored = []
    for role in roles:
        if not role.weights.trained:
            scored.append(role.weights)
    rows = rows_of(processes, work)
    passes = rows // work.micro_batch
    operations = 2.0 * rows * (work.prompt + work.response)  # per weight

    # Scoring and training.
    scoring_moved = sum(scoring_bytes(weights, processes, -(-passes // 4)) for weights in scored)
    scoring = operations * sum(weights.parameters for weights in scored) / (speeds.peak * speeds.scoring)
    score = together(scoring, moving_seconds(scoring_moved, processes, speeds), speeds)
    training_moved = sum(training_bytes(weights, processes, passes) for weights in trained)
    training = 3 * operations * sum(weights.parameters for weights in trained) / (speeds.peak * speeds.training)
    train = together(training, moving_seconds(training_moved, processes, speeds), speeds)

    # Pushing weights: ZeRO 3 gathers them, and one process sends them to all servers.
    pushed = push_bytes(actor)
    gathered = pushed * (processes - 1) / processes if actor.zero.stage == 3 else 0
    push = moving_seconds(gathered, processes, speeds)
    if layout.servers:
        is_one_node = processes + layout.servers <= NODE
        push += pushed / (speeds.nvlink if is_one_node else speeds.infiniband)

    share = speeds.own_decoding if way == OWN else speeds.vllm_decoding
    sample = sampling_seconds(layout, share, work, speeds)
    return IterationCost(push, sample, score, train, pushed, scoring_moved + training_moved)


def rows_of(processes: int, work: ClusterIteration) -> int:
    """Responses of a process: whole micro-batches."""
    return -(-work.responses // (processes * work.micro_batch)) * work.micro_batch


def sampling_seconds(layout: GpuLayout, share: float, work: ClusterIteration, speeds: Assumptions) -> float:
    """Seconds in which each engine generates its share of the responses."""
    role = layout.plan.roles[0]
    parallel = layout.parallel
    rows = work.responses * parallel / (layout.servers or layout.processes)
    at_once = min(rows, layout.slots)
    cache_bytes = at_once * (work.prompt + work.response / 2) * token_bytes(layout, parallel) * parallel
    weights = push_bytes(role.weights)
    operations = 2 * role.weights.parameters
    sums = 2 * role.model.config.num_hidden_layers
    step = step_seconds(weights, cache_bytes, operations * at_once, sums, parallel, share, speeds)
    prefill = operations * rows * work.prompt / (parallel * speeds.peak * speeds.prefill)
    return prefill + work.response * step * rows / at_once


def token_bytes(layout: GpuLayout, parallel: int) -> float:
    """Bytes of a token's keys and values on each GPU of an engine; a head is not divided."""
    role = layout.plan.roles[0]
    heads = getattr(role.model.config, "num_key_value_heads", parallel)
    return shape_of(role.model).cached * role.weights.width / min(parallel, heads)


def best(way: str, name: str, gpus: int, work: ClusterIteration, speeds: Assumptions) -> Row:
    """The fastest layout, or that none fits."""
    row: Row = {"model": name, "gpus": gpus, "way": way}
    is_ahead = way == AHEAD
    choices = []
    for layout in layouts(way, name, gpus, work, speeds):
        choices.append((layout, iteration(layout, way, work, speeds)))
    if not choices:
        return row | {"layout": "does not fit"}
    layout, cost = min(choices, key=lambda choice: choice[1].seconds(is_ahead))
    seconds = cost.seconds(is_ahead)
    row |= {"layout": layout.name} | dataclasses.asdict(cost)
    return row | {"total": seconds, "rate": work.responses * work.response / seconds}


# ---- Tables ----


def time_table(rows: Sequence[Row]) -> str:
    """The rows of one model; numbers of GPUs on which nothing fits are listed below."""
    seconds = ("push", "sample", "score", "train", "total")
    fitting = {row["gpus"] for row in rows if "total" in row}
    lines = []
    missing: dict[str, None] = {}
    for row in rows:
        if row["gpus"] not in fitting:
            missing[f"{row['gpus']}"] = None
            continue
        cells = [""] * 7
        if "total" in row:
            cells = [f"{float(row[name]):.3g}" for name in seconds]
            cells += [f"{float(row['moved']) / GB:,.0f}", f"{float(row['rate']):,.0f}"]
        lines.append([f"{row['gpus']}", str(row["way"]), str(row["layout"]), *cells])
    headers = ["push, s", "sample, s", "score, s", "train, s", "total, s"]
    text = table(["GPUs", "setup", "layout", *headers, "into a GPU, GB", "tokens/s"], lines)
    return f"{text}\n\nNothing fits on {', '.join(missing)}." if missing else text


def byte_table(names: Sequence[str], gpus: int, work: ClusterIteration, speeds: Assumptions) -> str:
    """Bytes that move in an iteration at ZeRO 3, and how long the push would take alone."""
    lines = []
    for name in names:
        plan = make_layout_plan(name, gpus, work.micro_batch, "--zero_stage 3", work, speeds)
        cost = iteration(GpuLayout(plan), OWN, work, speeds)
        over_nccl = cost.pushed / speeds.infiniband
        over_http = cost.pushed / speeds.http
        cells = (cost.pushed / GB, over_nccl, over_http, cost.moved / GB)
        lines.append([name, *(f"{cell:,.1f}" for cell in cells)])
    headers = ["model", "push, GB", "over NCCL between nodes, s", "over HTTP, s"]
    return table([*headers, f"scoring and training on {gpus} GPUs, GB into each"], lines)


def assumption_table(speeds: Assumptions, measured: Iterable[str] = ()) -> str:
    """Every assumption and its source."""
    lines = []
    for assumption in dataclasses.fields(speeds):
        value = getattr(speeds, assumption.name)
        source = assumption.metadata["source"]
        if value != assumption.default:
            source = "measured" if assumption.name in measured else "as on the command line"
        lines.append([assumption.name, f"{value:g}", assumption.metadata["unit"], source])
    return table(["flag", "value", "what", "source"], lines)


def measured_figures(file: Path) -> dict[str, float]:
    """The assumptions that a piece of gpu.py has measured: limits, and the best share of them."""
    figures = json.loads(file.read_text(encoding="utf-8"))["figures"]
    measured = {"hbm": figures["limits"]["bytes_per_second"], "peak": figures["limits"]["operations_per_second"]}
    assumption_of_column = {
        "of_limit": "own_decoding",
        "drawing_of_limit": "own_decoding",
        "scoring_of_limit": "scoring",
        "training_of_limit": "training",
    }
    for row in figures["rows"]:
        if "transformers" in row.get("decoder", ""):
            continue
        for column, assumption in assumption_of_column.items():
            if column in row:
                measured[assumption] = max(row[column], measured.get(assumption, 0.0))
    return measured


def read_settings() -> argparse.Namespace:
    """The flags."""
    defaults = {**vars(Assumptions()), **vars(ClusterIteration())}
    parser = settings_parser(__doc__, "sections scaling … are", **defaults)
    parser.add_argument("--models", nargs="+", choices=SIZES, default=SIZES)
    parser.add_argument("--gpus", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--measured", type=Path, nargs="+", default=[], help="PIECE.json of gpu.py; overrides flags")
    parser.add_argument("--json", type=Path, help="file for all rows")
    return parser.parse_args()


def main() -> None:
    """Prints the tables, and writes what the flags ask for."""
    settings = read_settings()
    measured: dict[str, float] = {}
    for file in settings.measured:
        measured |= measured_figures(file)
    values = vars(settings) | measured
    speeds = Assumptions(**{name: values[name] for name in vars(Assumptions())})
    work = ClusterIteration(**{name: values[name] for name in vars(ClusterIteration())})

    texts = {
        "assumptions": assumption_table(speeds, measured),
        "bytes": byte_table(settings.models, max(settings.gpus), work, speeds),
    }
    rows = []
    for name in settings.models:
        rows_of_model = []
        for gpus in settings.gpus:
            rows_of_model += [best(way, name, gpus, work, speeds) for way in WAYS]
        rows += rows_of_model
        texts[name] = time_table(rows_of_model)

    for name, text in texts.items():
        print(f"{name}\n\n{text}\n", flush=True)
        if settings.markdown is not None:
            write_section(settings.markdown, f"scaling {name}", text)
    if settings.markdown is not None:
        write_section(settings.markdown, "scaling", origin().splitlines()[0])
    if settings.json is not None:
        write_file(settings.json, json.dumps(report_of(settings, rows), indent=2, default=str) + "\n")


if __name__ == "__main__":
    main()
