# SPDX-License-Identifier: Apache-2.0
"""What a run sends to vLLM servers and what it does where they go, with stand-ins for the servers."""

import signal
import sys
import threading
import time
import types
from dataclasses import replace

import pytest
import torch

from dschat.base.errors import ServerLost, UserError
from dschat.run import stop
from dschat.run.stop import Stopped, stop_signals
from dschat.vllm import client, pending
from dschat.vllm import servers as vllm_servers
from dschat.vllm.client import pieces
from dschat.vllm.options import ServeVllmOptions
from dschat.vllm.serve import server_command
from dschat.vllm.servers import ServerNeeds, VllmServers
from dschat.vllm.weights import plain_weights
from factories import engine_of, make_causal_lm, sampling_of
from fake_vllm_server import WeightServer

NEEDS = ServerNeeds(vocabulary=100, max_tokens=32, temperature=0.7)
PROMPTS, SEEDS = [[5], [5, 6], [5, 6, 7], [5, 6, 7, 8], [9]], [11, 12, 13, 14, 15]


@pytest.fixture
def servers():
    made = []

    def make(**about):
        made.append(WeightServer(**about))
        return made[-1]

    yield make
    for server in made:
        server.stop()


@pytest.fixture
def actor(group):
    return engine_of(make_causal_lm("gpt2"), learning_rate=0.1)


def drawn_of(draw, prompts=PROMPTS, seeds=SEEDS):
    found = draw(prompts, sampling_of(4), seeds)
    return found.rollout.response_rows(), found.rollout.drawn_logprobs.tolist()


EXPECTED = [[3 + seed, 4 + len(prompt)] for prompt, seed in zip(PROMPTS, SEEDS, strict=True)]


def test_weights_arrive_to_the_bit_and_rows_are_dealt_out(actor, servers):
    """In pieces, on every server, with what it must know; before every session, under a new version."""
    both = servers(), servers()
    engine, versions = VllmServers([server.url for server in both], NEEDS), []
    for _ in range(2):
        with engine.session(actor) as draw:
            assert drawn_of(draw) == (EXPECTED, [[-1.0, -2.0]] * 5)
        expected = dict(plain_weights(actor))
        for server in both:
            assert server.weights.keys() == expected.keys()
            assert all(torch.equal(server.weights[name], weight) for name, weight in expected.items())
        versions.append(both[0].version)
        with torch.no_grad():
            next(actor.module.parameters()).mul_(2)
    assert [sorted(server.drawn) for server in both] == [sorted(PROMPTS[:3] * 2), sorted(PROMPTS[3:] * 2)]
    assert len(set(versions)) == 2 and both[1].version == versions[1]
    assert both[0].salts == set(versions), "nothing that was computed with other weights is taken from a cache"
    info = both[0].info
    assert info["temperature"] == 0.7 and "transformer.h.0.attn.c_attn.weight" in info["transposed"]
    assert info["missing"] == []
    assert both[0].paths.count("/init_weight_transfer_engine") == 1


def test_limits_of_rows_are_asked_for(actor, servers):
    """And kept to, whatever a server answers; a row that is cut has not ended, though others that are longer go on."""
    server, asked, limits = servers(), {}, [1, 2, 1, 2, 1]
    draw_of_server = server.draw
    server.draw = lambda ids, given: (asked.update({tuple(ids): given["max_tokens"]}), draw_of_server(ids, given))[1]
    with VllmServers([server.url], NEEDS).session(actor) as draw:
        drawn = draw(PROMPTS, sampling_of(4), SEEDS, limits=limits).rollout
    assert drawn.response_rows() == [row[:limit] for row, limit in zip(EXPECTED, limits, strict=True)]
    assert not drawn.finished.any()
    assert [asked[tuple(prompt)] for prompt in PROMPTS] == limits


def test_pieces_of_a_weight():
    weight = torch.arange(10, dtype=torch.bfloat16).view(5, 2).T
    found = list(pieces(weight, size=8))
    assert [len(piece) for piece in found] == [8, 8, 4]
    # 0, 2, 4, 6, 8, 1, 3, 5, 7, 9 in bfloat16, row by row: the upper halves of their float32 representation
    assert b"".join(found).hex() == "000000408040c0400041803f4040a040e0401041"


def test_a_server_that_is_free_gets_the_next_row(actor, servers, monkeypatch):
    """Of two that sample two rows at a time, the quick one gets all that the slow one has no time for."""
    monkeypatch.setattr(pending, "ROWS_PER_SERVER", 2)
    slow, quick = servers(), servers()
    prompts = [[5] * length for length in range(1, 21)]
    seeds = list(range(20))
    with VllmServers([slow.url, quick.url], NEEDS).session(actor) as draw:
        slow.draws_for = 1.0
        rows, _ = drawn_of(draw, prompts, seeds)
    assert rows == [[3 + seed, 4 + len(prompt)] for prompt, seed in zip(prompts, seeds, strict=True)]
    assert sorted(slow.drawn + quick.drawn) == prompts
    assert len(slow.drawn) < 6 and sorted(slow.drawn)[:2] == prompts[:2]


@pytest.mark.parametrize(
    ("requests", "servers", "processes", "expected"),
    [
        (5, 2, 1, 3),  # equal shares, as long as a server has room
        (2000, 2, 1, 128),  # 256 connections of one process
        (2000, 1, 8, 32),  # 256 rows of a server, for eight processes
        (10, 1, 1000, 1),
    ],
)
def test_rows_that_a_server_gets_at_once(requests, servers, processes, expected):
    assert pending.requests_at_once(requests, servers, processes) == expected


def test_a_server_that_goes_ends_the_run(actor, servers):
    """Whichever of its servers it is; the message says how to go on."""
    both = servers(), servers()
    both[1].fails_after = 1
    with VllmServers([server.url for server in both], NEEDS).session(actor) as draw:
        with pytest.raises(ServerLost, match=f"{both[1].url} .*. Start it .* resumes with --resume_from_checkpoint"):
            drawn_of(draw)


def test_a_server_that_has_lost_the_weights_ends_the_run(actor, servers):
    """One that was started anew: while responses are sampled, or between two rollouts."""
    server = servers()
    engine = VllmServers([server.url], NEEDS)
    with engine.session(actor) as draw:
        server.version = "default"
        with pytest.raises(ServerLost, match="has been started anew, without this run's weights. Start it"):
            drawn_of(draw)
    with pytest.raises(ServerLost, match="started anew"):
        engine.session(actor).__enter__()
    with VllmServers([server.url], NEEDS).session(actor) as draw:
        assert drawn_of(draw)[0] == EXPECTED, "a run that goes on introduces itself again"


def test_a_server_whose_machine_is_off_is_noticed(actor, servers, monkeypatch):
    """No connection ends, and it does not answer a health check either."""
    monkeypatch.setattr(pending, "HEALTH_INTERVAL", 0.1)
    monkeypatch.setattr(client, "HEALTH_TIMEOUT", 0.2)
    server = servers()
    with VllmServers([server.url], NEEDS).session(actor) as draw:
        server.sleeps = 5.0
        with pytest.raises(ServerLost, match="does not answer. Start it"):
            drawn_of(draw)


@pytest.mark.parametrize("busy", [False, True])
def test_an_engine_that_hangs_though_its_server_is_well_ends_the_run(busy, actor, servers, monkeypatch):
    """One response a second is enough, none in 1.5 is not: five, one after the other, take longer than that."""
    monkeypatch.setattr(pending, "HEALTH_INTERVAL", 0.1)
    server = servers()
    turns = threading.Lock()
    draw_of_server = server.draw

    def draw_in_turn(prompt, parameters):
        with turns:
            threading.Event().wait(0.5 if busy else 30)
            return draw_of_server(prompt, parameters)

    with VllmServers([server.url], replace(NEEDS, timeout=1.5)).session(actor) as draw:
        server.draw = draw_in_turn
        if busy:
            assert drawn_of(draw)[0] == EXPECTED
            return
        begun = time.monotonic()
        with pytest.raises(ServerLost, match=r"has finished no response for 1.5 s \(--vllm_timeout\)"):
            drawn_of(draw)
        assert time.monotonic() - begun < 10


def test_a_fault_of_our_own_is_not_blamed_on_a_server(actor, servers, monkeypatch, caplog):
    async def fail(*_):
        raise NameError("oops")

    server = servers()
    with VllmServers([server.url], NEEDS).session(actor) as draw:
        monkeypatch.setattr(client.ServerClient, "generate", fail)
        with pytest.raises(UserError, match=r"--vllm_url: sampling failed: NameError\('oops'\)"):
            drawn_of(draw)
    assert "sampling on vLLM servers failed" in caplog.text and "Traceback" in caplog.text


def test_weights_that_have_not_changed_are_sent_once(actor, servers):
    """A session with the same weights sends none; an ordinary one sends them every time."""
    server = servers()
    engine = VllmServers([server.url], NEEDS)
    with engine.session(actor, same_weights=True) as draw:
        assert drawn_of(draw)[0] == EXPECTED
    assert server.paths.count("/start_weight_update") == 1, "of the first session, which nobody opened before"
    for _ in range(2):
        with engine.session(actor, same_weights=True) as draw:
            assert drawn_of(draw)[0] == EXPECTED
    assert server.paths.count("/start_weight_update") == 1
    with engine.session(actor):
        assert server.paths.count("/start_weight_update") == 2


def test_pieces_of_two_runs_are_never_put_together(actor, servers):
    """The second takes the server over while the first sends: whose next piece is refused, and who says why."""
    server = servers()
    first = VllmServers([server.url], NEEDS)
    second = VllmServers([server.url], NEEDS)
    take = server.take

    def take_and_be_taken_over(weight, piece):
        take(weight, piece)
        server.take = take
        with second.session(actor) as draw:
            assert drawn_of(draw)[0] == EXPECTED

    server.take = take_and_be_taken_over
    with pytest.raises(UserError, match=f"has weights {second._run}.1 and not {first._run}.1.*another run uses"):
        first.session(actor).__enter__()
    expected = dict(plain_weights(actor))
    assert server.version == f"{second._run}.1" and server.weights.keys() == expected.keys()


def test_a_signal_ends_the_waiting(actor, servers, monkeypatch):
    monkeypatch.setattr(stop, "_received", 0)
    server = servers()
    with stop_signals(), VllmServers([server.url], NEEDS).session(actor) as draw:
        server.sleeps = 5.0
        threading.Timer(0.3, signal.raise_signal, [signal.SIGTERM]).start()
        with pytest.raises(Stopped):
            drawn_of(draw)


def test_what_was_begun_is_there_later(actor, servers):
    """Beside other work; a session waits until it has been drawn, with the weights of then."""
    server = servers()
    engine = VllmServers([server.url], NEEDS)
    with engine.session(actor):
        server.draws_for = 0.3
        pending = engine.begin(PROMPTS, sampling_of(4), SEEDS)
    version = server.version
    with engine.session(actor) as draw:
        assert server.version != version and drawn_of(draw, PROMPTS[:1], [50])[0] == [[53, 5]]
    assert pending.settle().rollout.response_rows() == EXPECTED == pending.finish().rollout.response_rows()
    with engine.session(actor):
        server.stop()
        pending = engine.begin(PROMPTS, sampling_of(4), SEEDS)
        assert pending.settle() is None
        with pytest.raises(ServerLost):
            pending.finish()
    server.start()


@pytest.mark.parametrize(
    ("about", "told"),
    [
        ({"backend": "nccl"}, "its backend is nccl, not dschat. Start it with dschat serve-vllm"),
        ({"max_tokens": 31}, "may have 31 tokens there, but 32 here. Start it with --max_tokens 32"),
    ],
)
def test_servers_of_another_kind(about, told, actor, servers):
    with pytest.raises(UserError, match=told):
        VllmServers([servers(**about).url], NEEDS).session(actor).__enter__()


def test_another_run_uses_the_server(actor, servers):
    server = servers()
    engine = VllmServers([server.url], NEEDS)
    with engine.session(actor) as draw:
        server.version = "another.1"
        with pytest.raises(UserError, match="has weights another.1 and not .*: another run uses the server"):
            drawn_of(draw)
    engine = VllmServers([server.url], NEEDS)
    with engine.session(actor) as draw:
        server.says = "another.2"
        with pytest.raises(UserError, match="has weights another.2 and not .*: another run uses the server"):
            drawn_of(draw)
    server.version = "another.1"
    with pytest.raises(UserError, match="another run uses the server"):
        engine.session(actor).__enter__()


class Group:
    """Stands in for NCCL's: keeps what it broadcasts."""

    def __init__(self, meeting):
        self.meeting, self.sent, self.is_aborted = meeting, [], threading.Event()
        GROUPS.append(self)

    def broadcast(self, weight, src, stream):
        assert weight.is_contiguous() and src == 0
        self.sent.append(weight.clone())

    def destroy(self):
        self.is_aborted.set()


GROUPS = []


@pytest.fixture
def nccl(monkeypatch):
    """Both sides say that they have GPUs and vLLM."""
    GROUPS.clear()
    module = types.ModuleType("nccl_common")
    module.trainer_init = Group
    monkeypatch.setitem(sys.modules, "vllm", types.ModuleType("vllm"))
    for name in ("vllm.distributed", "vllm.distributed.weight_transfer"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "vllm.distributed.weight_transfer.nccl_common", module)
    monkeypatch.setattr(vllm_servers, "find_spec", lambda name: name)
    monkeypatch.setattr(vllm_servers, "on_gpu", lambda: True)
    return module


def test_weights_go_by_nccl_where_both_sides_can(actor, servers, nccl, monkeypatch):
    """Every weight once, after the servers have been told its name and shape; each meets the trainer where it can."""
    both = servers(device="cuda", workers=2), servers(device="cuda")
    sources = {both[0].url: "127.0.0.1", both[1].url: "10.0.0.1"}
    monkeypatch.setattr(client, "local_address", sources.get)
    for server in both:
        server.waits_for = lambda server=server: GROUPS and len(GROUPS[-1].sent) == len(server.sent)
    weights = dict(plain_weights(actor))
    engine = VllmServers([server.url for server in both], NEEDS)
    with engine.session(actor) as draw:
        assert drawn_of(draw)[0] == EXPECTED
    (group,) = GROUPS
    assert group.meeting["world_size"] == 4 and group.meeting["master_address"] == "0.0.0.0"
    assert [server.info["nccl"]["master_address"] for server in both] == ["127.0.0.1", "10.0.0.1"]
    assert [server.info["nccl"]["rank_offset"] for server in both] == [1, 3]
    for server in both:
        assert [update["name"] for update in server.sent] == list(weights)
        assert [update["shape"] for update in server.sent] == [list(weight.shape) for weight in weights.values()]
    assert all(torch.equal(one, other) for one, other in zip(group.sent, weights.values(), strict=True))
    with engine.session(actor):
        assert len(GROUPS) == 1 and len(group.sent) == 2 * len(weights)


class HangingGroup(Group):
    """Its broadcast ends when it is aborted."""

    def broadcast(self, weight, src, stream):
        self.is_aborted.wait()


class BrokenGroup(Group):
    """NCCL reports that a peer has gone."""

    def broadcast(self, weight, src, stream):
        raise RuntimeError("NCCL error: remote process exited")


@pytest.mark.parametrize(
    ("group_class", "told"),
    [
        (HangingGroup, "TimeoutError: NCCL has not finished in 0.5 s. Stop the servers.*resumes with"),
        (BrokenGroup, "cannot be sent by NCCL: RuntimeError: NCCL error: remote process exited. Stop"),
    ],
)
def test_an_nccl_broadcast_that_hangs_or_fails_is_aborted(group_class, told, actor, servers, nccl, monkeypatch):
    """What follows, such as a checkpoint, needs the GPU."""
    nccl.trainer_init = group_class
    monkeypatch.setattr(client, "NCCL_TIMEOUT", 0.5)
    server = servers(device="cuda")
    server.waits_for = lambda: GROUPS[-1].is_aborted.is_set()
    with pytest.raises(ServerLost, match=told):
        VllmServers([server.url], NEEDS).session(actor).__enter__()
    assert GROUPS[-1].is_aborted.is_set()


def test_a_server_without_a_token_listens_here_alone(monkeypatch):
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    with pytest.raises(UserError, match="--host 0.0.0.0: anyone who can reach it could .* Set VLLM_API_KEY"):
        ServeVllmOptions(model="m", host="0.0.0.0")


def test_a_server_with_a_token_may_listen_everywhere(monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    words = server_command(
        ServeVllmOptions(model="m", host="0.0.0.0", tensor_parallel=2, max_tokens=9000, dtype="bf16")
    )
    pairs = dict(zip(words, words[1:], strict=False))
    expected = {"--host": "0.0.0.0", "--tensor-parallel-size": "2", "--dtype": "bfloat16", "--max-model-len": "9000"}
    assert expected.items() <= pairs.items() and pairs["--max-num-batched-tokens"] == "9000"
    assert "secret" not in words
