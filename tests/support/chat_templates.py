# SPDX-License-Identifier: Apache-2.0
"""Chat templates that behave like those of well-known models, tools and thoughts included, and a byte-level tokenizer.

Each is written for this project after the behaviour of the family: what it adds around a content, which roles it
refuses, which fields of messages it reads, and what it leaves out of earlier turns.
"""

from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

ALTERNATE = (
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
)
CHATML_TURNS = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
CHATML_PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
# A call as Qwen2.5 and Qwen3 write it.
QWEN_CALLS = (
    "{% for call in m.tool_calls %}{% set f = call.function if call.function is defined else call %}"
    "{{ '\\n' if not loop.first or m.content }}<tool_call>\n"
    '{{ \'{"name": "\' + f.name + \'", "arguments": \' }}'
    "{{ f.arguments if f.arguments is string else f.arguments | tojson }}{{ '}' }}\n</tool_call>{% endfor %}"
)
QWEN_TOOLS = (
    "{% if tools %}<|im_start|>system\n{{ messages[0].content if messages[0].role == 'system' else 'You help.' }}"
    "\n\n# Tools\n<tools>{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}\n</tools><|im_end|>\n"
    "{% elif messages[0].role != 'system' %}<|im_start|>system\nYou help.<|im_end|>\n{% endif %}"
)

TEMPLATES = {
    # Mistral 7B Instruct: no generation prompt, a blank before the reply, no system role.
    "mistral": (
        "{{ bos_token }}{% for m in messages %}" + ALTERNATE + "{% if m.role == 'user' %}"
        "[INST] {{ m.content }} [/INST]"
        "{% else %}{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}"
    ),
    # Mistral 7B Instruct v0.3: tools before the last question, calls as a JSON list with their ids.
    "mistral-tools": (
        "{{ bos_token }}{% set last = (messages | selectattr('role', 'equalto', 'user') | list)[-1] %}"
        "{% for m in messages %}{% if m.role == 'user' %}"
        "{% if tools and m == last %}[AVAILABLE_TOOLS] {{ tools | map(attribute='function') | list | tojson }}"
        "[/AVAILABLE_TOOLS]{% endif %}[INST] {{ m.content }}[/INST]"
        "{% elif m.tool_calls is defined %}[TOOL_CALLS] [{% for call in m.tool_calls %}"
        "{{ (call.function | tojson)[:-1] }}"
        "{% if call.id is not defined or call.id | length != 9 %}{{ raise_exception('ids must have 9 characters') }}"
        '{% endif %}, "id": "{{ call.id }}"}{% endfor %}]{{ eos_token }}'
        "{% elif m.role == 'tool' %}[TOOL_RESULTS] {{ m.content | tojson }}[/TOOL_RESULTS]"
        "{% else %} {{ m.content | trim }}{{ eos_token }}{% endif %}{% endfor %}"
    ),
    # Llama 2 Chat: the system prompt inside the first question, blanks on both sides of a reply.
    "llama-2": (
        "{% if messages[0].role == 'system' %}"
        "{% set system = '<<SYS>>\\n' + messages[0].content + '\\n<</SYS>>\\n\\n' %}"
        "{% set turns = messages[1:] %}{% else %}{% set system = '' %}{% set turns = messages %}{% endif %}"
        "{% for m in turns %}" + ALTERNATE + "{% set text = (system if loop.first else '') + m.content %}"
        "{% if m.role == 'user' %}{{ bos_token + '[INST] ' + text.strip() + ' [/INST]' }}"
        "{% else %}{{ ' ' + text.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
    ),
    # Llama 3.1: tools in the first question, one call a turn, results as role ipython.
    "llama-3.1": (
        "{{ bos_token }}{% for m in messages %}{% if m.role in ('tool', 'ipython') %}"
        "<|start_header_id|>ipython<|end_header_id|>\n\n"
        "{{ m.content | tojson if m.content is mapping else m.content }}<|eot_id|>"
        "{% elif 'tool_calls' in m %}{% if m.tool_calls | length != 1 %}"
        "{{ raise_exception('This model only supports single tool-calls at once!') }}{% endif %}"
        "{% set f = m.tool_calls[0].function %}<|start_header_id|>assistant<|end_header_id|>\n\n"
        "{{ '{\"name\": \"' + f.name + '\", \"parameters\": ' }}{{ f.arguments | tojson }}{{ '}' }}<|eot_id|>"
        "{% else %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
        "{% if tools and loop.first %}You have functions.\n"
        "{% for t in tools %}{{ t | tojson(indent=4) }}\n{% endfor %}"
        "{% endif %}{{ m.content | trim }}<|eot_id|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
    ),
    # Qwen2.5: a system prompt of its own, results of tools as the user's.
    "qwen-2.5": (
        QWEN_TOOLS + "{% for m in messages %}{% if m.role == 'tool' %}"
        "<|im_start|>user\n<tool_response>\n{{ m.content }}\n</tool_response><|im_end|>\n"
        "{% elif m.role != 'system' or not (loop.first and tools) %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "{% if m.tool_calls %}" + QWEN_CALLS + "{% endif %}<|im_end|>\n{% endif %}{% endfor %}" + CHATML_PROMPT
    ),
    # Qwen3: thoughts of the last turn alone, an empty one where there is none, and a switch.
    "qwen-3": (
        QWEN_TOOLS + "{% set q = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}"
        "{% set q.last = loop.index0 %}{% endif %}{% endfor %}"
        "{% for m in messages %}{% if m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}"
        "\n</tool_response><|im_end|>\n{% elif m.role == 'assistant' %}"
        "{% set text = m.content if m.content is string else '' %}{% set thought = '' %}"
        "{% if m.reasoning_content is string %}{% set thought = m.reasoning_content %}"
        "{% elif '</think>' in text %}{% set thought = text.split('</think>')[0].split('<think>')[-1].strip('\\n') %}"
        "{% set text = text.split('</think>')[-1].lstrip('\\n') %}{% endif %}<|im_start|>assistant\n"
        "{% if loop.index0 > q.last and (loop.last or thought) %}<think>\n{{ thought.strip('\\n') }}\n</think>\n\n"
        "{{ text.lstrip('\\n') }}{% else %}{{ text }}{% endif %}"
        "{% if m.tool_calls %}" + QWEN_CALLS + "{% endif %}<|im_end|>\n"
        "{% elif m.role != 'system' or not (loop.first and tools) %}"
        "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
        "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
    ),
    # DeepSeek R1: a generation prompt that opens a thought, no thought in any written turn, arguments as text.
    "r1": (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}"
        "{% elif m.role == 'user' %}<|User|>{{ m.content }}"
        "{% elif m.tool_calls is defined %}<|Assistant|>{% for call in m.tool_calls %}<|call|>"
        "{{ call.function.name + '\\n```json\\n' + call.function.arguments + '\\n```' }}{% endfor %}{{ eos_token }}"
        "{% elif m.role == 'assistant' %}{% set text = m.content %}"
        "{% if '</think>' in text %}{% set text = text.split('</think>')[-1] %}{% endif %}"
        "{{ '<|Assistant|>' + text + eos_token }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|Assistant|><think>\n{% endif %}"
    ),
    # SmolLM2: ChatML with a system prompt of its own.
    "smollm-2": (
        "{% for m in messages %}{% if loop.first and m.role != 'system' %}"
        "<|im_start|>system\nYou are SmolLM.<|im_end|>\n"
        "{% endif %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}" + CHATML_PROMPT
    ),
    # Gemma: the role model, trimmed contents, no system role.
    "gemma": (
        "{{ bos_token }}{% if messages[0].role == 'system' %}"
        "{{ raise_exception('System role not supported') }}{% endif %}"
        "{% for m in messages %}" + ALTERNATE + "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
        "{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
        "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
    ),
    # Zephyr: the generation prompt ends before the line break; other roles than three are left out.
    "zephyr": (
        "{% for m in messages %}{% if m.role == 'user' %}<|user|>{{ '\\n' + m.content + eos_token + '\\n' }}"
        "{% elif m.role == 'system' %}<|system|>{{ '\\n' + m.content + eos_token + '\\n' }}"
        "{% elif m.role == 'assistant' %}<|assistant|>{{ '\\n' + m.content + eos_token + '\\n' }}{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    ),
    "chatml": CHATML_TURNS + CHATML_PROMPT,
    "chatml without generation prompt": CHATML_TURNS,
}
# Templates that are looked at for one property each.
SPECIAL_TEMPLATES = {
    # Qwen3 Thinking 2507: the generation prompt opens a thought, which a written turn holds as well.
    "qwen-3-thinking": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
        "{% set text = m.content if m.content is string else '' %}{% set thought = '' %}"
        "{% if m.reasoning_content is string %}{% set thought = m.reasoning_content %}"
        "{% elif '</think>' in text %}"
        "{% set thought = text.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}"
        "{% set text = text.split('</think>')[-1].lstrip('\n') %}{% endif %}"
        "{% if loop.last %}<think>\n{{ thought.strip('\n') }}\n</think>\n\n{% endif %}{{ text }}"
        "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
    ),
    # DeepSeek V3.1: a turn begins with the end of a thought, a generation prompt opens one where `thinking` says so.
    "deepseek-v3.1": (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}<|User|>{{ m.content }}"
        "{% elif m.role == 'assistant' %}<|Assistant|></think>"
        "{% set text = m.content if m.content is string else '' %}"
        "{{ text.split('</think>', 1)[1] if '</think>' in text else text }}"
        "{% for call in m.tool_calls or [] %}<|call|>{{ call.function.name }}{{ call.function.arguments | tojson }}"
        "{% endfor %}{{ eos_token }}{% else %}{{ m.content }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|Assistant|>{{ '<think>' if thinking else '</think>' }}{% endif %}"
    ),
    # Phi-3: EOS behind the last turn alone.
    "phi-3": (
        "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}"
    ),
    # gpt-oss: channels, and a call that ends with another token than a text.
    "gpt-oss": (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% if m.tool_calls %}"
        "<|start|>assistant to=functions.{{ m.tool_calls[0].function.name }}<|channel|>commentary json<|message|>"
        "{{ m.tool_calls[0].function.arguments | tojson }}<|call|>"
        "{% else %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}"
        "{{ '<|return|>' if loop.last else '<|end|>' }}{% endif %}"
        "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
    ),
}
# Mistral 7B Instruct v0.3 and Nemo: a system prompt only in a question that is the last message.
SPECIAL_TEMPLATES["mistral-system"] = (
    "{% if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set messages = messages[1:] %}"
    "{% endif %}" + TEMPLATES["mistral-tools"]
).replace("[INST] {{ m.content }}", "[INST] {{ system + '\n\n' if loop.last and system is defined }}{{ m.content }}")
# Llama 3.1 whose calls of built-in tools end with a token of their own.
SPECIAL_TEMPLATES["llama-3.1-eom"] = TEMPLATES["llama-3.1"].replace("{{ '}' }}<|eot_id|>", "{{ '}' }}<|eom_id|>")
TOKENS = (
    *("<pad>", "<bos>", "<eos>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>"),
    *("<|eot_id|>", "<start_of_turn>", "<end_of_turn>", "<|user|>", "<|system|>", "<|assistant|>", "<|User|>"),
    *("<|Assistant|>", "<|call|>", "<|return|>", "<|eom_id|>", "<|end|>", "<|calls_begin|>", "<|calls_end|>"),
)


def byte_tokenizer(template: str) -> Any:
    """A tokenizer of one token per byte, without BOS before texts, that has the template of that name."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([*TOKENS, *alphabet])}
    backend = Tokenizer(models.BPE(vocabulary, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True) for token in TOKENS])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>"
    )
    tokenizer.chat_template = (TEMPLATES | SPECIAL_TEMPLATES)[template]
    return tokenizer
