# SPDX-License-Identifier: Apache-2.0
"""How long would an iteration of step 3 take on 1 to 64 GPUs, and what would it move? Computed, not measured.

Four models of one size; one update per rollout, prompts and responses of full length. Responses are drawn by our own
loop, by vLLM inside the training processes, by servers elsewhere, or by servers one rollout ahead. What fits, at which
ZeRO stage, is asked of `dschat.plan`, and so is each model's size; of several layouts the fastest counts. Speeds are
those of `Assumptions`, each of which is a flag and says where it comes from; --measured takes what gpu.py has written
(PIECE.json). Simplifications: two operations a weight and token in a forward, none for attention; all weights are read
for every decoded token; responses are dealt out evenly; nothing waits for a slower process; no optimiser step.
"""

import dataclasses
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from pathlib import Path

from transformers import AutoConfig

from dschat.base.atomic import write_file
from dschat.base.errors import UserError
from dschat.plan.models import published_config
from dschat.plan.passes import shape_of
from dschat.plan.phases import Machine
from dschat.plan.plan import Plan, make_plan
from dschat.plan.states import Weights
from dschat.settings.parse import parse
from dschat.settings.ppo import PPOConfig
from harness import GB, origin, report_of, settings_parser, table, write_section

LLAMA_70B = {"vocab_size": 128_256, "hidden_size": 8192, "intermediate_size": 28_672, "num_hidden_layers": 80}
LLAMA_70B |= {"num_attention_heads": 64, "num_key_value_heads": 8}
HUB_IDS = {"2B": "google/gemma-2b", "7B": "google/gemma-7b", "27B": "google/gemma-2-27b"}
SIZES = [*HUB_IDS, "70B"]
OWN, COLOCATED, SERVERS, AHEAD = "own loop", "vLLM inside", "servers", "servers, one ahead"
NODE = 8  # GPUs, as of a DGX H100
WAYS = (OWN, COLOCATED, SERVERS, AHEAD)
MOST_ROWS = 256  # that an engine draws at once; vLLM's default
SLOTS, SHARES = (128, 64, 32, 16, 8, 4), (0.2, 0.25, 0.3, 0.4, 0.5, 0.7)  # of our loop; of a GPU, for vLLM inside
SERVER_MEMORY = 0.9  # share of a server's GPU for weights and cache; vLLM's default
MODEL = "--actor_model_name_or_path a/model --critic_model_name_or_path a/model --data_path unnamed"
PLACE = "--output_dir planned/nowhere --overwrite_output_dir --gradient_checkpointing --dtype bf16"
Row = dict[str, float | str]


def assumed(value: float, unit: str, source: str = "assumed") -> float:
    """A field of `Assumptions`."""
    made: float = field(default=value, metadata={"unit": unit, "source": source})
    return made


@dataclass(frozen=True)
class Assumptions:
    """What a GPU, a node and the wires do. None of it was measured for this table."""

    memory: float = assumed(80e9, "bytes of a GPU", "published: H100")
    peak: float = assumed(989e12, "operations/s of a GPU, bf16", "published: H100, dense")
    hbm: float = assumed(2.93e12, "bytes/s of a GPU's memory", "published 3.35e12; 7/8 reached, stated of an H200")
    own_decoding: float = assumed(0.4, "share of hbm while our loop draws")
    vllm_decoding: float = assumed(0.45, "share of hbm while vLLM draws", "published: 0.3 to 0.6")
    prefill: float = assumed(0.4, "share of peak while prompts are read")
    scoring: float = assumed(0.2, "share of peak", "derived: whole iterations of 2B on one H200, 0.18 to 0.21")
    training: float = assumed(0.2, "share of peak", "derived, like scoring")
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
    micro_batch: int = 4  # responses of a training pass; scoring takes four times as many


def push_bytes(actor: Weights) -> float:
    """What goes to a sampler before every rollout: all of the actor's weights."""
    return actor.width * actor.parameters


def scoring_bytes(weights: Weights, processes: int, passes: int) -> float:
    """What a GPU receives while a model scores: at ZeRO 3 the weights of the others, in every pass."""
    whole = passes * weights.width * weights.parameters if weights.zero.stage == 3 else 0
    return whole * (processes - 1) / processes


def training_bytes(weights: Weights, processes: int, passes: int) -> float:
    """What a GPU receives in one update of a model, of so many micro-batches.

    ZeRO 3 gathers weights for each forward and each backward pass, and scatters sums of gradients after each; ZeRO 2
    scatters as often, and gathers weights once an update; below, gradients are summed up once, which counts twice.
    """
    stage, whole = weights.zero.stage, weights.width * weights.parameters
    trained = weights.width * weights.trained
    if stage == 3:
        moved = passes * (2 * whole + trained)
    elif stage == 2:
        moved = passes * trained + trained
    else:
        moved = 2 * weights.zero.gradient * weights.trained + trained
    return moved * (processes - 1) / processes


def moving_seconds(moved: float, processes: int, given: Assumptions) -> float:
    """Of bytes that each GPU of some receives from the others; what comes from other nodes enters a node once."""
    nodes = -(-processes // NODE)
    entering = moved * (1 - 1 / nodes) / (min(processes, NODE) * given.infiniband)
    return max(moved / given.nvlink, entering)


def together(one: float, other: float, given: Assumptions) -> float:
    """Seconds of computing and moving, which hide each other in part."""
    return max(one, other) + (1 - given.overlap) * min(one, other)


def step_seconds(
    weights: float, cache: float, operations: float, sums: int, parallel: int, share: float, given: Assumptions
) -> float:
    """Of one token of all rows: bytes read and operations of all GPUs of the engine, and tensor-parallel sums."""
    reading = (weights + cache) / (parallel * given.hbm * share)
    computing = operations / (parallel * given.peak * given.prefill)
    return max(reading, computing) + (sums * given.all_reduce if parallel > 1 else 0)


@dataclass(frozen=True)
class GpuLayout:
    """What stands on which GPU."""

    plan: Plan  # of the processes that train
    servers: int = 0  # GPUs that only draw
    parallel: int = 1  # GPUs of an engine
    slots: int = MOST_ROWS  # rows that an engine draws at once at most

    @property
    def name(self) -> str:
        """As the table has it."""
        stage = f"ZeRO {self.plan.roles[0].weights.zero.stage}"
        parts = f", engines of {self.parallel}" if self.parallel > 1 else ""
        return f"{self.plan.machine.processes} + {self.servers}, {stage}{parts}" if self.servers else stage + parts


@dataclass(frozen=True)
class IterationCost:
    """Seconds of its parts, and bytes."""

    push: float
    draw: float
    score: float
    train: float
    pushed: float  # bytes of the actor's weights
    moved: float  # bytes that a GPU receives while models score and train

    def seconds(self, ahead: bool) -> float:
        """All of it; `ahead`: responses are drawn while the models score and train on those before."""
        learning = self.score + self.train
        return self.push + (max(self.draw, learning) if ahead else self.draw + learning)


def iteration(layout: GpuLayout, way: str, work: ClusterIteration, given: Assumptions) -> IterationCost:
    """Of a layout."""
    roles, n = layout.plan.roles, layout.plan.machine.processes
    actor, trained = roles[0].weights, [role.weights for role in roles if role.weights.trained]
    scored = [role.weights for role in roles if not role.weights.trained]  # the one update scores with the others
    rows = rows_of(n, work)
    passes, operations = rows // work.micro_batch, 2.0 * rows * (work.prompt + work.response)
    read = sum(scoring_bytes(weights, n, -(-passes // 4)) for weights in scored)
    updated = sum(training_bytes(weights, n, passes) for weights in trained)
    computed = operations * sum(weights.parameters for weights in scored) / (given.peak * given.scoring)
    score = together(computed, moving_seconds(read, n, given), given)
    computed = 3 * operations * sum(weights.parameters for weights in trained) / (given.peak * given.training)
    train = together(computed, moving_seconds(updated, n, given), given)
    pushed = push_bytes(actor)
    gathered = pushed * (n - 1) / n if actor.zero.stage == 3 else 0
    push = moving_seconds(gathered, n, given)
    if layout.servers:  # one of the trainers sends to all
        push += pushed / (given.nvlink if n + layout.servers <= NODE else given.infiniband)
    drawn = draw_seconds(layout, given.own_decoding if way == OWN else given.vllm_decoding, work, given)
    return IterationCost(push, drawn, score, train, pushed, read + updated)


def rows_of(processes: int, work: ClusterIteration) -> int:
    """Responses of a process: whole micro-batches."""
    return -(-work.responses // (processes * work.micro_batch)) * work.micro_batch


def draw_seconds(layout: GpuLayout, share: float, work: ClusterIteration, given: Assumptions) -> float:
    """Of the responses of an engine, which has as many as the others."""
    role, k = layout.plan.roles[0], layout.parallel
    rows = work.responses * k / (layout.servers or layout.plan.machine.processes)
    at_once = min(rows, layout.slots)
    cache = at_once * (work.prompt + work.response / 2) * row_bytes(layout, k) * k
    weights, operations = push_bytes(role.weights), 2 * role.weights.parameters
    sums = 2 * role.model.config.num_hidden_layers
    step = step_seconds(weights, cache, operations * at_once, sums, k, share, given)
    reading = operations * rows * work.prompt / (k * given.peak * given.prefill)
    return reading + work.response * step * rows / at_once


def row_bytes(layout: GpuLayout, parallel: int) -> float:
    """Of a token's keys and values on each GPU of an engine; a head is not divided."""
    role = layout.plan.roles[0]
    heads = getattr(role.model.config, "num_key_value_heads", parallel)
    return shape_of(role.model).cached * role.weights.width / min(parallel, heads)


@cache
def plan(name: str, processes: int, slots: int, flags: str, work: ClusterIteration, given: Assumptions) -> Plan:
    """Of the processes that train, with so many rows drawn at once."""
    rows = rows_of(processes, work)
    lengths = f"--max_prompt_seq_len {work.prompt} --max_answer_seq_len {work.response}"
    sizes = f"--per_device_generation_batch_size {slots} --generation_batches {rows // slots}"
    sizes += f" --per_device_training_batch_size {work.micro_batch}"
    sizes += f" --gradient_accumulation_steps {rows // work.micro_batch}"
    words = f"{MODEL} {PLACE} {lengths} {sizes} {flags}".split()
    config = published_config(HUB_IDS[name]) if name in HUB_IDS else AutoConfig.for_model("llama", **LLAMA_70B)
    machine = Machine(processes, int(given.memory), gpus_per_node=NODE)
    return make_plan(parse(PPOConfig, words, runs_here=False), machine, lambda path, flag: config)


def layouts(way: str, name: str, gpus: int, work: ClusterIteration, given: Assumptions) -> Iterator[GpuLayout]:
    """Those that fit."""
    powers, rows = [1 << i for i in range(gpus.bit_length())], rows_of(gpus, work)
    engines = [k for k in powers if k <= NODE]
    for stage in ("--zero_stage 0", "--zero_stage 2", "--zero_stage 3"):
        if way == OWN:
            own = [GpuLayout(plan(name, gpus, n, stage, work, given), slots=n) for n in SLOTS if rows % n == 0]
            yield from (each for each in own if each.plan.fits_device)
        elif way == COLOCATED:
            for k, share in product(engines, SHARES):
                flags = f"{stage} --rollout_engine vllm --vllm_tensor_parallel {k} --vllm_gpu_memory {share}"
                with suppress(UserError):  # not even the weights
                    found = plan(name, gpus, rows, flags, work, given)
                    yield from with_rows(GpuLayout(found, parallel=k), share, work, given) if found.fits_device else ()
        else:
            for servers in (n for n in powers if n < gpus):
                flags = f"{stage} --rollout_engine vllm --vllm_url http://SERVER:8000"
                found = plan(name, gpus - servers, work.micro_batch, flags, work, given)
                for k in (k for k in engines if k <= servers and found.fits_device):
                    yield from with_rows(GpuLayout(found, servers, k), SERVER_MEMORY, work, given)


def with_rows(layout: GpuLayout, share: float, work: ClusterIteration, given: Assumptions) -> list[GpuLayout]:
    """With as many rows of full length as fit beside the weights in an engine's share of the memory; [] for none."""
    room = share * given.memory - push_bytes(layout.plan.roles[0].weights) / layout.parallel
    rows = min(MOST_ROWS, int(room / ((work.prompt + work.response) * row_bytes(layout, layout.parallel))))
    return [dataclasses.replace(layout, slots=rows)] if rows > 0 else []


def best(way: str, name: str, gpus: int, work: ClusterIteration, given: Assumptions) -> Row:
    """The fastest layout, or that there is none."""
    ahead, row = way == AHEAD, Row(model=name, gpus=gpus, way=way)
    found = [(layout, iteration(layout, way, work, given)) for layout in layouts(way, name, gpus, work, given)]
    if not found:
        return row | {"layout": "does not fit"}
    layout, parts = min(found, key=lambda each: each[1].seconds(ahead))
    rate = work.responses * work.response / parts.seconds(ahead)
    row |= {"layout": layout.name} | dataclasses.asdict(parts)
    return row | {"total": parts.seconds(ahead), "rate": rate}


def time_table(rows: Sequence[Row]) -> str:
    """Of one model; numbers of GPUs on which nothing fits stand below."""
    shown, lines = ("push", "draw", "score", "train", "total"), []
    fitting = {row["gpus"] for row in rows if "total" in row}
    for row in (row for row in rows if row["gpus"] in fitting):
        figures = [f"{float(row[name]):.3g}" for name in shown] if "total" in row else [""] * 7
        figures += [f"{float(row['moved']) / GB:,.0f}", f"{float(row['rate']):,.0f}"] if "total" in row else []
        lines.append([f"{row['gpus']}", str(row["way"]), str(row["layout"]), *figures])
    text = table(["GPUs", "way", "layout", *(f"{name}, s" for name in shown), "into a GPU, GB", "tokens/s"], lines)
    others = ", ".join(dict.fromkeys(f"{row['gpus']}" for row in rows if row["gpus"] not in fitting))
    return f"{text}\n\nNothing fits on {others}." if others else text


def byte_table(names: Sequence[str], gpus: int, work: ClusterIteration, given: Assumptions) -> str:
    """What moves in an iteration at ZeRO 3, and how long the push would take alone."""
    lines = []
    for name in names:
        found = plan(name, gpus, work.micro_batch, "--zero_stage 3", work, given)
        moved = iteration(GpuLayout(found), OWN, work, given).moved
        pushed = push_bytes(found.roles[0].weights)
        whole = [pushed, pushed / given.infiniband * GB, pushed / given.http * GB, moved]
        lines.append([name, *(f"{size / GB:,.1f}" for size in whole)])
    over = ["push, GB", "over NCCL between nodes, s", "over HTTP, s"]
    return table(["model", *over, f"scoring and training on {gpus} GPUs, GB into each"], lines)


def assumption_table(given: Assumptions, measured: Iterable[str] = ()) -> str:
    """Every figure and where it comes from."""
    lines = []
    for each in dataclasses.fields(given):
        value, source = getattr(given, each.name), each.metadata["source"]
        if value != each.default:
            source = "measured" if each.name in measured else "as on the command line"
        lines.append([each.name, f"{value:g}", each.metadata["unit"], source])
    return table(["flag", "value", "what", "source"], lines)


def measured_figures(file: Path) -> dict[str, float]:
    """Those of `Assumptions` that a piece of gpu.py has measured: limits, and the best share of them."""
    figures = json.loads(file.read_text(encoding="utf-8"))["figures"]
    found = {"hbm": figures["limits"]["bytes_per_second"], "peak": figures["limits"]["operations_per_second"]}
    names = {"of_limit": "own_decoding", "drawing_of_limit": "own_decoding"}
    names |= {"scoring_of_limit": "scoring", "training_of_limit": "training"}
    for row in figures["rows"]:
        for name in names.keys() & row.keys() if "transformers" not in row.get("decoder", "") else ():
            found[names[name]] = max(row[name], found.get(names[name], 0.0))
    return found


def main() -> None:
    """Prints the tables, and writes what is asked for."""
    parser = settings_parser(__doc__, "sections scaling … are", **vars(Assumptions()), **vars(ClusterIteration()))
    parser.add_argument("--models", nargs="+", choices=SIZES, default=SIZES)
    parser.add_argument("--gpus", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--measured", type=Path, nargs="+", default=[], help="PIECE.json of gpu.py; wins over flags")
    parser.add_argument("--json", type=Path, help="file for all rows")
    settings = parser.parse_args()
    measured = {name: value for file in settings.measured for name, value in measured_figures(file).items()}
    values = vars(settings) | measured
    given = Assumptions(**{name: values[name] for name in vars(Assumptions())})
    work = ClusterIteration(**{name: values[name] for name in vars(ClusterIteration())})
    rows = [best(way, name, n, work, given) for name in settings.models for n in settings.gpus for way in WAYS]
    texts = {"assumptions": assumption_table(given, measured)}
    texts["bytes"] = byte_table(settings.models, max(settings.gpus), work, given)
    texts |= {name: time_table([row for row in rows if row["model"] == name]) for name in settings.models}
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
