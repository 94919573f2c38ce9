# SPDX-License-Identifier: Apache-2.0
"""Text metrics of whole models: equal to plain transformers row by row, for any batch size, through a kill."""

import json

import pytest
import torch

from cli_runs import read_jsonl, write_jsonl
from closeness import near
from dschat.base.errors import UserError
from dschat.cli import main
from dschat.data.sources import hold_out, read_source
from dschat.evaluation import text
from dschat.evaluation.generate_options import TextOptions
from dschat.evaluation.text import run_models, run_text
from dschat.models.reward_notes import note_end_token
from factories import BOS, EOS, hf_score, make_causal_lm, make_classifier, save_folder

PROMPTS = (
    "the quick ",
    "a cat sat on a mat, and ate ",
    "we make zebra puzzles; vex ",
    "jinx ",
    "an apple at a table. ",
)
CHOSEN = ("brown fox", "an apple at a table", "jinx, quartz and whisky follow", "a cat", "the lazy dog")
REJECTED = ("dog", "a table and a mat", "the quick brown fox jumps over the lazy dog", "zebra", "vex")


@pytest.fixture
def place(tmp_path, tokenizer):
    """Two policies, a reward model, five comparisons."""
    rows = [{"prompt": p, "chosen": c, "rejected": r} for p, c, r in zip(PROMPTS, CHOSEN, REJECTED, strict=True)]
    write_jsonl(tmp_path / "data" / "train.jsonl", rows[:2])
    write_jsonl(tmp_path / "data" / "eval.jsonl", rows)
    for seed in (1, 2):
        save_folder(tmp_path / f"policy{seed}", make_causal_lm("gpt2", seed), tokenizer)
    save_folder(tmp_path / "rm", make_classifier("gemma", 3), tokenizer)
    return tmp_path


def measure(place, name="out", **flags):
    flags = {"data": str(place / "data"), "device": "cpu", "max_new_tokens": 6, "dtype": "fp32"} | flags
    run_text(TextOptions(output=place / name, **flags))
    return read_jsonl(place / name / "rows.jsonl")


def texts_of(tokenizer, sft_on_prompt):
    """Ids of prompt and response, and the first place that is trained on."""
    for prompt, response in zip(PROMPTS, CHOSEN, strict=True):
        head = [BOS, *tokenizer(prompt, add_special_tokens=False)["input_ids"]]
        ids = [*head, *tokenizer(response, add_special_tokens=False)["input_ids"], EOS]
        yield ids, 1 if sft_on_prompt else len(head)


@pytest.mark.parametrize("sft_on_prompt", [False, True])
def test_losses_are_those_of_plain_transformers(place, tokenizer, sft_on_prompt):
    """A text alone, without padding: −log softmax of the logits at the token before."""
    rows = measure(place, model=[str(place / "policy1")], no_rouge=True, sft_on_prompt=sft_on_prompt)
    model = make_causal_lm("gpt2", 1).eval().requires_grad_(False)
    assert len(rows) == 5 and "response" not in rows[0]
    for row, (ids, first) in zip(rows, texts_of(tokenizer, sft_on_prompt), strict=True):
        logits = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        losses = [-float(logits[place - 1, ids[place]]) for place in range(first, len(ids))]
        assert row["loss_tokens"] == len(losses)
        assert row["loss_sum"] == near(sum(losses))


def test_batches_of_one_and_of_sixteen_say_the_same(place):
    """Prompts of different lengths are padded on the left; responses are cut out where they are all the same."""
    flags = {"model": [str(place / "policy1")], "reward_model": [str(place / "rm")]}
    one, many = (measure(place, f"out{size}", batch_size=size, **flags) for size in (1, 16))
    for first, second in zip(one, many, strict=True):
        assert first.keys() == second.keys()
        for name, value in first.items():
            assert value == (near(second[name]) if isinstance(value, float) else second[name])


def test_responses_end_at_the_token_that_ended_them_in_training(place, tokenizer):
    """The first token of a greedy response becomes the one that ends a conversation: that response is empty."""
    free = measure(place, "free", model=[str(place / "policy1")])
    first = tokenizer.tokenize(free[0]["response"])[0]
    rows = measure(place, model=[str(place / "policy1")], end_of_conversation_token=first)
    assert free[0]["response_tokens"] > 1
    assert (rows[0]["response"], rows[0]["response_tokens"], rows[0]["finished"]) == ("", 1, True)


def test_responses_are_greedy_and_compared_with_the_data(place, tokenizer):
    rows = measure(place, model=[str(place / "policy1")])
    model = make_causal_lm("gpt2", 1).eval()
    for row, prompt in zip(rows, PROMPTS, strict=True):
        ids = [BOS, *tokenizer(prompt, add_special_tokens=False)["input_ids"]]
        drawn = []
        while len(drawn) < 6 and drawn[-1:] != [EOS]:
            drawn.append(int(model(torch.tensor([ids + drawn])).logits[0, -1].argmax()))
        assert row["response"] == tokenizer.decode([number for number in drawn if number != EOS])
        assert row["response_tokens"] == len(drawn) and row["finished"] == (drawn[-1] == EOS)
        assert {"rouge1", "rouge2", "rougeL"} <= set(row)


@pytest.mark.parametrize("flag", [None, "z"])
def test_a_reward_model_is_measured_at_the_token_that_it_was_trained_at(place, tokenizer, flag, caplog):
    """The one of its config.json, unless the flag names another."""
    classifier = make_classifier("gemma", 3).eval()
    noted, given = tokenizer.convert_tokens_to_ids(["e", "z"])
    note_end_token(classifier, tokenizer, noted)
    save_folder(place / "noted", classifier, tokenizer)
    end = noted if flag is None else given
    # A run beside the model does not lead to a warning: the model is read as it was trained.
    (place / "noted" / "train_config.json").write_text(json.dumps({"seed": 1234, "end_of_conversation_token": "e"}))
    rows = measure(place, reward_model=[str(place / "noted")], end_of_conversation_token=flag)
    assert ("are not those of training" in caplog.text) == (flag is not None)
    for row, prompt, *responses in zip(rows, PROMPTS, CHOSEN, REJECTED, strict=True):
        parts = [[BOS, *tokenizer(prompt, add_special_tokens=False)["input_ids"]]]
        parts += [tokenizer(response, add_special_tokens=False)["input_ids"] for response in responses]
        better, worse = (hf_score(classifier, [*parts[0], *part, end]) for part in parts[1:])
        assert (row["chosen_score"], row["rejected_score"]) == near((better, worse))


def test_an_interrupted_run_goes_on_with_the_same_rows_alone(place, interrupt):
    flags = {"model": [str(place / "policy1"), str(place / "policy2")], "batch_size": 2}
    whole = measure(place, "whole", **flags)
    interrupt(text, "read_and_answer", 4)  # in the second model
    with pytest.raises(KeyboardInterrupt):
        measure(place, **flags)
    assert not (place / "out" / "rows.jsonl").exists()
    calls = interrupt(text, "read_and_answer")
    for other, said in (({"split": "train"}, r"--data .*rows [0-9a-f]{12}\)"), ({"sft_on_prompt": True}, "sft_on_")):
        with pytest.raises(UserError, match=f"begun with .*{said}.*, now it is"):
            measure(place, **flags, **other)
    assert measure(place, **flags) == whole and len(calls) == 2
    with pytest.raises(UserError, match="rows.jsonl exists, finished"):
        measure(place, **flags)


def test_all_models_of_a_run(place):
    """models/step-N and the final ones, by updates; the last step is the final model."""
    run = place / "run"
    for name in ("models/step-10/actor", "models/step-2/actor", "models/step-12/actor", "actor"):
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).symlink_to(place / "policy1")
    (run / "run.json").write_text(json.dumps({"step": "ppo", "batches": {"total_updates": 12}}))
    (run / "train_config.json").write_text(json.dumps({"seed": 1234}))
    rows = measure(place, checkpoints=run, num_samples=2, no_rouge=True)
    assert [(row["model"], row["update"]) for row in rows[::2]] == [("step-2", 2), ("step-10", 10), ("final", 12)]
    assert len({row["prompt"] for row in rows}) == 2, "the same texts for every model"


def test_models_that_a_resumed_run_gave_up_are_not_measured(place):
    """It went on from update 4, so that the model of 10 updates and the final one are of another schedule."""
    run = place / "run"
    for name in ("models/step-4", "models/step-10"):
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).symlink_to(place / "policy1")
    for file in (place / "policy1").iterdir():
        (run / file.name).symlink_to(file)
    record = {"step": "sft", "finished": False, "saved": ["elsewhere/models/step-4"], "batches": {"total_updates": 40}}
    (run / "run.json").write_text(json.dumps(record))
    (run / "train_config.json").write_text("{}")
    assert [model.name for model in run_models(run)] == ["step-4"]
    (run / "run.json").write_text(json.dumps(record | {"finished": True}))
    assert [model.name for model in run_models(run)] == ["step-4", "final"]


def test_held_out_rows_are_those_of_the_run(place):
    """Data without evaluation rows: those that all runs on these data held out."""
    rows = [{"prompt": f"jinx {number}", "chosen": "a cat"} for number in range(60)]
    write_jsonl(place / "many.jsonl", rows)
    run, trained = place / "run", place / "trained"
    for folder, share in ((run, 0.2), (trained, 0.1)):
        folder.mkdir()
        (folder / "actor").symlink_to(place / "policy1")
        config = {"eval_share": share, "data_path": [str(place / "many.jsonl")]}
        (folder / "train_config.json").write_text(json.dumps(config))
    (run / "run.json").write_text(json.dumps({"step": "ppo"}))
    flags = {"data": str(place / "many.jsonl"), "no_rouge": True}
    expected = [row.prompt for row in hold_out(read_source(place / "many.jsonl"), 0.1).eval]
    rows = measure(place, model=[str(trained)], checkpoints=run, **flags)
    assert [row["prompt"] for row in rows] == expected * 2 and len(expected) == 6


@pytest.fixture
def run_with_flags(place):
    """A run of step 1 on other columns, cut at 20 tokens, whose responses end with another token than EOS."""
    rows = [{"q": prompt, "a": chosen} for prompt, chosen in zip(PROMPTS, CHOSEN, strict=True)]
    write_jsonl(place / "questions.jsonl", rows)
    run = place / "run"
    (run / "models").mkdir(parents=True)
    (run / "models" / "step-2").symlink_to(place / "policy1")
    (run / "run.json").write_text(json.dumps({"step": "sft"}))
    flags = {
        "data_path": [str(place / "questions.jsonl")],
        "max_seq_len": 20,
        "end_of_conversation_token": "<pad>",
        "apply_chat_template": False,
        "sft_on_prompt": True,
    }
    columns = {"prompt_key": "q", "response_key": "a"}
    (run / "train_config.json").write_text(json.dumps(flags | columns | {"learning_rate": 1.0}))
    return run


def test_texts_are_read_as_the_run_of_the_checkpoints_read_them(place, run_with_flags, caplog):
    caplog.set_level("INFO")
    flags = {"data": str(place / "questions.jsonl"), "split": "train", "no_rouge": True}
    alone = {"model": [str(place / "policy1")], "prompt_key": "q", "response_key": "a"}
    of_run = {"max_seq_len": 20, "end_of_conversation_token": "<pad>", "sft_on_prompt": True}
    expected = measure(place, "alone", **of_run, **alone, **flags)
    other = measure(place, "other", **alone, **flags)
    assert [row["loss_sum"] for row in expected] != [row["loss_sum"] for row in other]
    rows = measure(place, checkpoints=run_with_flags, **flags)
    assert [row["loss_sum"] for row in rows] == [row["loss_sum"] for row in expected]
    assert f"--checkpoints {run_with_flags}: as in that run, --max_seq_len=20 --sft_on_prompt=" in caplog.text


def test_all_turns_of_the_assistant_have_a_loss_where_the_run_trained_on_them(place, run_with_flags):
    """Two turns of 'a b': twice the tokens of the last one. A dialogue that the user ends has no ROUGE."""
    template = "{% for message in messages %}{{ message['content'] + eos_token }}{% endfor %}"
    (place / "policy1" / "chat_template.jinja").write_text(template)
    turn = [{"role": "user", "content": "c"}, {"role": "assistant", "content": "a b"}]
    chats = write_jsonl(place / "chats.jsonl", [{"messages": 2 * turn}])
    flags = {"data": str(chats), "split": "all", "no_rouge": True}
    (last,) = measure(place, "last", model=[str(place / "policy1")], **flags)
    (run_with_flags / "train_config.json").write_text(json.dumps({"train_on": "all"}))
    (both,) = measure(place, checkpoints=run_with_flags, **flags)
    assert both["loss_tokens"] == 2 * last["loss_tokens"] > 0
    assert "every message of the assistant (--train_on all)" in (place / "out" / "report.md").read_text()
    write_jsonl(chats, [{"messages": [*2 * turn, turn[0]]}, {"messages": turn}])
    rows = measure(place, "rouge", checkpoints=run_with_flags, data=str(chats), split="all")
    assert sorted("rouge1" in row for row in rows) == [False, True] and all("response_tokens" in row for row in rows)
    (policy,) = json.loads((place / "rouge" / "report.json").read_text())["policies"]
    assert policy["rows"] == 2 and policy["rouge"].keys() == {"rouge1", "rouge2", "rougeL"}


def test_a_model_that_learnt_another_format_is_named(place, run_with_flags, tokenizer, caplog):
    save_folder(run_with_flags, make_causal_lm("gpt2", 1), tokenizer)
    flags = {"model": [str(run_with_flags)], "no_rouge": True}
    measure(place, "same", end_of_conversation_token="<pad>", **flags)
    assert "its run had" not in caplog.text
    measure(place, "other", **flags)
    assert f"--model {run_with_flags}: its run had --end_of_conversation_token <pad>, and this mea" in caplog.text
    assert caplog.text.count("its run had") == 1


def test_a_loss_that_is_no_number_is_said(place, tokenizer, caplog):
    """By name; the files hold null, which is JSON."""
    classifier = make_classifier("gemma", 3)
    classifier.score.weight.data.fill_(float("nan"))
    classifier.config.reward_loss = "last_token"
    save_folder(place / "broken", classifier, tokenizer)
    rows = measure(place, reward_model=[str(place / "broken")])
    assert rows[0]["chosen_score"] is None
    assert "broken: chosen_score or rejected_score of 5 of 5 texts is not finite" in caplog.text
    assert "was trained with --reward_loss last_token, which does not train the number at the last" in caplog.text


def test_what_is_left_out_is_said(place, caplog):
    rows = measure(place, model=[str(place / "policy1")], no_rouge=True, max_prompt_len=8, split="eval")
    left_out = 5 - len(rows)
    assert 0 < left_out < 5 and f"{left_out} of 5 texts left out (prompt too long: {left_out})" in caplog.text
    with pytest.raises(UserError, match="none of the 5 texts is left"):
        measure(place, "none", model=[str(place / "policy1")], max_prompt_len=1)
    (place / "empty").mkdir()
    (place / "empty" / "run.json").write_text('{"step": "sft"}')
    with pytest.raises(UserError, match="no output folder of a run that has kept models. With --save_models"):
        measure(place, "none", checkpoints=place / "empty")


def test_the_command(place, capsys):
    """On the training rows."""
    words = ["--model", place / "policy1", "--data", place / "data", "--output", place / "out", "--split", "train"]
    assert main(list(map(str, ["text", *words, "--max_new_tokens", 4, "--device", "cpu"]))) == 0
    assert "| policy1 |" in capsys.readouterr().out and len(read_jsonl(place / "out" / "rows.jsonl")) == 2
