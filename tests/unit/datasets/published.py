"""Chat templates in the form of published ones, in words of their own: what they put around turns, drop and move."""

from tests.unit.datasets.chat import CHATML

LLAMA2 = (
    "{% set first = messages[0]['content'] if messages[0]['role'] == 'system' else '' %}"
    "{% for m in (messages[1:] if first else messages) %}"
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must take turns') }}{% endif %}"
    "{% if m['role'] == 'user' %}"
    "{% set said = '<<SYS>>\n' + first + '\n<</SYS>>\n\n' + m['content'] if loop.first and first else m['content'] %}"
    "{{ bos_token + '[INST] ' + said.strip() + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'].strip() + ' ' + eos_token }}{% endif %}"
    "{% endfor %}"
)
# Calls are JSON in the place of a text, and results are quoted.
LLAMA31 = (
    "{% macro head(role) %}{{ '<|start_header_id|>' + role + '<|end_header_id|>\n\n' }}{% endmacro %}"
    "{{ bos_token }}"
    "{% if tools %}{{ head('system') }}Environment: ipython{% for t in tools %}{{ '\n' + t | tojson }}{% endfor %}"
    "{{ '<|eot_id|>' }}{% endif %}"
    "{% for m in messages %}"
    "{% if m['role'] == 'tool' %}{{ head('ipython') + m['content'] | tojson + '<|eot_id|>' }}"
    "{% elif m.tool_calls %}{{ head('assistant') }}"
    '{{ \'{"name": "\' + m.tool_calls[0].function.name + \'", "parameters": \' }}'
    "{{ m.tool_calls[0].function.arguments | tojson + '}' + '<|eot_id|>' }}"
    "{% else %}{{ head(m['role']) + m['content'] | trim + '<|eot_id|>' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ head('assistant') }}{% endif %}"
)
_HERMES_TOOLS = (
    "{% if tools %}{{ '<|im_start|>system\n' }}# Tools{% for t in tools %}{{ '\n' + t | tojson }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endif %}"
)
# Consecutive results share one turn of the user.
_HERMES_RESULT = (
    "{% if loop.first or messages[loop.index0 - 1]['role'] != 'tool' %}{{ '<|im_start|>user' }}{% endif %}"
    "{{ '\n<tool_response>\n' + m['content'] + '\n</tool_response>' }}"
    "{% if loop.last or messages[loop.index0 + 1]['role'] != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}"
)
_HERMES_CALLS = (
    "{% for c in m.tool_calls %}{{ '\n' if text or not loop.first else '' }}"
    '{{ \'<tool_call>\n{"name": "\' + c.function.name + \'", "arguments": \' + c.function.arguments | tojson }}'
    "{{ '}\n</tool_call>' }}{% endfor %}"
)
QWEN25 = (
    _HERMES_TOOLS + "{% for m in messages %}"
    "{% if m['role'] == 'tool' %}" + _HERMES_RESULT + "{% elif m['role'] == 'assistant' %}"
    "{% set text = m['content'] %}"
    "{{ '<|im_start|>assistant\n' + text }}" + _HERMES_CALLS + "{{ '<|im_end|>\n' }}"
    "{% else %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Only answers after the last question keep their reasoning, and of those the last one gets an empty one.
QWEN3 = (
    _HERMES_TOOLS + "{% set ns = namespace(query=0) %}"
    "{% for m in messages %}{% if m['role'] == 'user' %}{% set ns.query = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}"
    "{% if m['role'] == 'tool' %}" + _HERMES_RESULT + "{% elif m['role'] == 'assistant' %}"
    "{% set why = m.reasoning_content if m.reasoning_content else '' %}{% set text = m['content'] %}"
    "{% if not why and '</think>' in text %}"
    "{% set why = text.split('</think>')[0].split('<think>')[-1].strip() %}"
    "{% set text = text.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{{ '<|im_start|>assistant\n' }}"
    "{% if loop.index0 > ns.query and (loop.last or why) %}{{ '<think>\n' + why.strip() + '\n</think>\n\n' }}{% endif "
    "%}"
    "{{ text }}" + _HERMES_CALLS + "{{ '<|im_end|>\n' }}"
    "{% else %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# A conversation that does not ask for an answer ends with one more token.
PHI3 = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] + '<|end|>\n' }}{% endfor %}"
    "{{ '<|assistant|>\n' if add_generation_prompt else '<|endoftext|>' }}"
)
PHI4 = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '<|im_sep|>' + m['content'] + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant<|im_sep|>' }}{% endif %}"
)
# The tools and the system's text go to the last question.
MISTRAL_V3 = (
    "{% set system = messages[0]['content'] if messages[0]['role'] == 'system' else '' %}"
    "{% set turns = messages[1:] if system else messages %}"
    "{% set ns = namespace(last=0) %}"
    "{% for m in turns %}{% if m['role'] == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{{ bos_token }}"
    "{% for m in turns %}"
    "{% if m['role'] == 'user' %}"
    "{% if tools and loop.index0 == ns.last %}{{ '[AVAILABLE_TOOLS] ' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{% "
    "endif %}{{ '[INST] ' + (system + '\n\n' if system and loop.index0 == ns.last else '') + m['content'] + '[/INST]' "
    "}}"
    '{% elif m.tool_calls %}{{ \'[TOOL_CALLS] [{"name": "\' + m.tool_calls[0].function.name + \'", "arguments": \' }}'
    "{{ m.tool_calls[0].function.arguments | tojson + '}]' + eos_token }}"
    "{% elif m['role'] == 'tool' %}{{ '[TOOL_RESULTS] {\"content\": ' + m['content'] + '}[/TOOL_RESULTS]' }}"
    "{% else %}{{ ' ' + m['content'] + eos_token }}{% endif %}"
    "{% endfor %}"
)
GEMMA = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{{ bos_token }}"
    "{% for m in messages %}"
    "{{ '<start_of_turn>' + ('model' if m['role'] == 'assistant' else m['role']) + '\n' }}"
    "{{ m['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
# The prompt opens the reasoning, of which the text of an answer keeps nothing.
DEEPSEEK_R1 = (
    "{{ bos_token }}"
    "{% for m in messages %}"
    "{% if m['role'] == 'system' %}{{ m['content'] }}"
    "{% elif m['role'] == 'user' %}{{ '<|User|>' + m['content'] }}"
    "{% elif m.tool_calls %}{{ '<|Assistant|><|tool_calls|>' + m.tool_calls[0].function.name + '\n' }}"
    "{{ m.tool_calls[0].function.arguments + '<|end_of_sentence|>' }}"
    "{% elif m['role'] == 'tool' %}{{ '<|tool_outputs|>' + m['content'] }}"
    "{% else %}{{ '<|Assistant|>' + m['content'].split('</think>')[-1] + '<|end_of_sentence|>' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|Assistant|><think>\n' }}{% endif %}"
)
# No token ends a turn but the one that names the next speaker.
GLM4 = (
    "[gMASK]<sop>"
    "{% if tools %}{{ '<|system|>\n' }}{% for t in tools %}{{ t | tojson }}{% endfor %}{% endif %}"
    "{% for m in messages %}"
    "{% if m['role'] == 'tool' %}{{ '<|observation|>\n' + m['content'] }}"
    "{% elif m.tool_calls %}{{ '<|assistant|>' + m.tool_calls[0].function.name + '\n' }}"
    "{{ m.tool_calls[0].function.arguments | tojson }}"
    "{% else %}{{ '<|' + m['role'] + '|>\n' + m['content'] }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
TEMPLATES = {
    "chatml": CHATML,
    "llama-2": LLAMA2,
    "llama-3.1": LLAMA31,
    "qwen2.5": QWEN25,
    "qwen3": QWEN3,
    "phi-3": PHI3,
    "phi-4": PHI4,
    "mistral-v3": MISTRAL_V3,
    "gemma": GEMMA,
    "deepseek-r1": DEEPSEEK_R1,
    "glm-4": GLM4,
}
