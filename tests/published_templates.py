"""Chat templates in the style in which Moonshot and DeepSeek publish theirs, and a naive one.

They are written for these tests, with the published quirks: role words from `name`, history cut off at the last answer,
string addition that fails on null, arguments taken as text by one and through `tojson` by the other.
"""

KIMI_K25 = """{%- macro text_of(message) -%}
  {%- set body = message.get('content') -%}
  {%- if body is string -%}{{ body }}{%- elif body is not none -%}
    {%- for part in body -%}{{ part['text'] }}{%- endfor -%}
  {%- endif -%}
{%- endmacro -%}
{%- macro head(message) -%}
  {%- set word = message.get('name') or message['role'] -%}
  {%- if message['role'] == 'user' -%}<|im_user|>{{ word }}<|im_middle|>
  {%- elif message['role'] == 'assistant' -%}<|im_assistant|>{{ word }}<|im_middle|>
  {%- else -%}<|im_system|>{{ word }}<|im_middle|>{%- endif -%}
{%- endmacro -%}
{%- macro calls_of(message) -%}
  <|tool_calls_section_begin|>
  {%- for call in message['tool_calls'] -%}
    <|tool_call_begin|>{{ call['id'] }}<|tool_call_argument_begin|>
    {%- if call['function']['arguments'] is string -%}{{ call['function']['arguments'] }}
    {%- else -%}{{ call['function']['arguments'] | tojson }}{%- endif -%}<|tool_call_end|>
  {%- endfor -%}
  <|tool_calls_section_end|>
{%- endmacro -%}
{%- set ns = namespace(last=-1) -%}
{%- for index in range(messages | length - 1, -1, -1) -%}
  {%- if messages[index]['role'] == 'assistant' and not messages[index].get('tool_calls') -%}
    {%- set ns.last = index -%}{%- break -%}
  {%- endif -%}
{%- endfor -%}
{%- if tools -%}
  {%- if tools_ts_str -%}<|im_system|>tool_declare<|im_middle|>{{ tools_ts_str }}<|im_end|>
  {%- else -%}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson(separators=(',', ':')) }}<|im_end|>
  {%- endif -%}
{%- endif -%}
{%- if messages[0]['role'] != 'system' -%}
<|im_system|>system<|im_middle|>You are Kimi, an AI assistant created by Moonshot AI.<|im_end|>
{%- endif -%}
{%- for message in messages[:ns.last + 1] -%}
  {{ head(message) }}
  {%- if message['role'] == 'assistant' -%}
    {%- if preserve_thinking is defined and preserve_thinking -%}
      <think>{{ message.get('reasoning_content', '') }}</think>
    {%- else -%}<think></think>{%- endif -%}
    {{ text_of(message) }}{%- if message.get('tool_calls') -%}{{ calls_of(message) }}{%- endif -%}
  {%- elif message['role'] == 'tool' -%}
    ## Return of {{ message.tool_call_id }}
{{ text_of(message) }}
  {%- elif message['content'] is not none -%}{{ text_of(message) }}{%- endif -%}
  <|im_end|>
{%- endfor -%}
{%- for message in messages[ns.last + 1:] -%}
  {{ head(message) }}
  {%- if message['role'] == 'assistant' -%}
    {%- if thinking is defined and thinking is false -%}<think></think>
    {%- else -%}<think>{{ message.get('reasoning_content', '') }}</think>{%- endif -%}
    {{ text_of(message) }}{%- if message.get('tool_calls') -%}{{ calls_of(message) }}{%- endif -%}
  {%- elif message['role'] == 'tool' -%}
    ## Return of {{ message.tool_call_id }}
{{ text_of(message) }}
  {%- elif message['content'] is not none -%}{{ text_of(message) }}{%- endif -%}
  <|im_end|>
{%- endfor -%}
{%- if add_generation_prompt -%}
  <|im_assistant|>assistant<|im_middle|>
  {%- if thinking is defined and thinking is false -%}<think></think>{%- else -%}<think>{%- endif -%}
{%- endif -%}
"""

KIMI_K2 = """{% if tools -%}
  {{ '<|im_system|>tool_declare<|im_middle|>' -}}
  {{- tools | tojson(separators=(',', ':')) -}}
  {{ '<|im_end|>' -}}
{%- endif -%}
{%- for message in messages -%}
  {%- if loop.first and messages[0]['role'] != 'system' -%}
    {{ '<|im_system|>system<|im_middle|>You are a helpful assistant<|im_end|>' }}
  {%- endif -%}
  {%- if message['role'] == 'system' -%}{{ '<|im_system|>system<|im_middle|>' }}
  {%- elif message['role'] == 'user' -%}{{ '<|im_user|>user<|im_middle|>' }}
  {%- elif message['role'] == 'assistant' -%}{{ '<|im_assistant|>assistant<|im_middle|>' }}
  {%- elif message['role'] == 'tool' -%}{{ '<|im_system|>tool<|im_middle|>' }}
  {%- endif -%}
  {%- if message['role'] == 'assistant' and message.get('tool_calls') -%}
    {%- if message['content'] -%}{{ message['content'] }}{%- endif -%}
    {{ '<|tool_calls_section_begin|>' }}
    {%- for call in message['tool_calls'] -%}
      {{ '<|tool_call_begin|>' + call['id'] + '<|tool_call_argument_begin|>' }}
      {%- if call['function']['arguments'] is string -%}{{ call['function']['arguments'] }}
      {%- else -%}{{ call['function']['arguments'] | tojson }}{%- endif -%}
      {{ '<|tool_call_end|>' }}
    {%- endfor -%}
    {{ '<|tool_calls_section_end|>' }}
  {%- elif message['role'] == 'tool' -%}
    {{ '## Return of ' + message['tool_call_id'] + '\\n' }}{{ message['content'] }}
  {%- else -%}{{ message['content'] }}
  {%- endif -%}
  {{ '<|im_end|>' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_assistant|>assistant<|im_middle|>' }}{%- endif -%}
"""


def _deepseek(text: str) -> str:
    """`text` with DeepSeek's bar and space for | and _ within <| |>, which keeps the templates below readable."""
    for word in ("User", "Assistant", "begin_of_sentence", "end_of_sentence"):
        text = text.replace(f"<|{word}|>", f"<\uff5c{word.replace('_', chr(0x2581))}\uff5c>")
    for word in ("calls_begin", "calls_end", "call_begin", "call_end", "sep"):
        text = text.replace(f"<|tool_{word}|>", f"<\uff5ctool\u2581{word.replace('_', chr(0x2581))}\uff5c>")
    for word in ("outputs_begin", "outputs_end", "output_begin", "output_end"):
        text = text.replace(f"<|tool_{word}|>", f"<\uff5ctool\u2581{word.replace('_', chr(0x2581))}\uff5c>")
    return text


DEEPSEEK_V31 = _deepseek("""{%- if not add_generation_prompt is defined %}
  {%- set add_generation_prompt = false %}{% endif %}
{%- if not thinking is defined %}{% set thinking = false %}{% endif %}
{%- set ns = namespace(is_first=false, is_tool=false, system_prompt='', is_first_sp=true, is_last_user=false) %}
{%- for message in messages %}{%- if message['role'] == 'system' %}
  {%- if ns.is_first_sp %}{% set ns.system_prompt = message['content'] %}{% set ns.is_first_sp = false %}
  {%- else %}{% set ns.system_prompt = ns.system_prompt + '\\n\\n' + message['content'] %}{% endif %}
{%- endif %}{%- endfor %}
{{- bos_token }}{{ ns.system_prompt }}
{%- for message in messages %}
  {%- if message['role'] == 'user' %}
    {%- set ns.is_tool = false %}{%- set ns.is_first = false %}{%- set ns.is_last_user = true %}
    {{- '<|User|>' + message['content'] }}
  {%- endif %}
  {%- set calls = message['tool_calls'] is defined and message['tool_calls'] is not none %}
  {%- if message['role'] == 'assistant' and calls %}
    {%- if ns.is_last_user %}{{ '<|Assistant|></think>' }}{% endif %}
    {%- set ns.is_last_user = false %}{%- set ns.is_first = false %}{%- set ns.is_tool = false %}
    {%- for tool in message['tool_calls'] %}
      {%- set call = '<|tool_call_begin|>' + tool['function']['name'] + '<|tool_sep|>' + ARGUMENTS
        + '<|tool_call_end|>' %}
      {%- if not ns.is_first %}
        {{- (message['content'] if message['content'] is not none else '') + '<|tool_calls_begin|>' + call }}
        {%- set ns.is_first = true %}
      {%- else %}{{- call }}{% endif %}
    {%- endfor %}
    {{- '<|tool_calls_end|><|end_of_sentence|>' }}
  {%- endif %}
  {%- if message['role'] == 'assistant' and not calls %}
    {%- if ns.is_last_user %}{{ '<|Assistant|></think>' }}{% endif %}
    {%- set ns.is_last_user = false %}
    {%- set content = message['content'] %}
    {%- if not ns.is_tool and '</think>' in content %}{% set content = content.split('</think>', 1)[1] %}{% endif %}
    {%- set ns.is_tool = false %}
    {{- content + '<|end_of_sentence|>' }}
  {%- endif %}
  {%- if message['role'] == 'tool' %}
    {%- set ns.is_last_user = false %}{%- set ns.is_tool = true %}
    {{- '<|tool_output_begin|>' + message['content'] + '<|tool_output_end|>' }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt and ns.is_last_user and not ns.is_tool %}
  {{- '<|Assistant|>' }}{{- '<think>' if thinking else '</think>' }}
{%- endif %}""")
DEEPSEEK_V31_TEXT = DEEPSEEK_V31.replace("ARGUMENTS", "tool['function']['arguments']")
DEEPSEEK_V31_JSON = DEEPSEEK_V31.replace("ARGUMENTS", "(tool['function']['arguments'] | tojson)")

DEEPSEEK_V3 = _deepseek("""
{%- set ns = namespace(is_first=false, is_tool=false, is_output_first=true, system_prompt='') %}
{%- for message in messages %}{%- if message['role'] == 'system' %}
  {%- set ns.system_prompt = ns.system_prompt + ('\\n\\n' if ns.system_prompt else '') + message['content'] %}
{%- endif %}{%- endfor %}
{{- bos_token }}{{ ns.system_prompt }}
{%- for message in messages %}
  {%- if message['role'] == 'user' %}
    {%- set ns.is_tool = false %}{{- '<|User|>' + message['content'] + '<|Assistant|>' }}
  {%- endif %}
  {%- set calls = message['tool_calls'] is defined and message['tool_calls'] is not none %}
  {%- if message['role'] == 'assistant' and calls %}
    {%- if ns.is_tool %}{{ '<|tool_outputs_end|>' }}{% endif %}
    {%- set ns.is_first = false %}{%- set ns.is_tool = false %}{%- set ns.is_output_first = true %}
    {%- for tool in message['tool_calls'] %}
      {%- set call = '<|tool_call_begin|>' + tool['type'] + '<|tool_sep|>' + tool['function']['name'] + '\\n```json\\n'
        + tool['function']['arguments'] + '\\n```<|tool_call_end|>' %}
      {%- if not ns.is_first %}
        {{- ('' if message['content'] is none else message['content']) + '<|tool_calls_begin|>' + call }}
        {%- set ns.is_first = true %}
      {%- else %}{{- '\\n' + call }}{% endif %}
    {%- endfor %}
    {{- '<|tool_calls_end|><|end_of_sentence|>' }}
  {%- endif %}
  {%- if message['role'] == 'assistant' and not calls %}
    {%- if ns.is_tool %}{{ '<|tool_outputs_end|>' }}{% endif %}
    {%- set ns.is_tool = false %}{{- message['content'] + '<|end_of_sentence|>' }}
  {%- endif %}
  {%- if message['role'] == 'tool' %}
    {%- set ns.is_tool = true %}
    {{- '<|tool_outputs_begin|>' if ns.is_output_first else '\\n' }}
    {{- '<|tool_output_begin|>' + message['content'] + '<|tool_output_end|>' }}
    {%- set ns.is_output_first = false %}
  {%- endif %}
{%- endfor %}
{%- if ns.is_tool %}{{ '<|tool_outputs_end|>' }}{% endif %}""")

# What a careless owner might write: it composes a control token's name around what the caller says.
NAIVE = (
    "{% for message in messages %}<|im_{{ message.role }}|>{{ message.name }}{{ message.content | trim }}"
    "{% for call in message.tool_calls or [] %}{{ call | tojson }}{% endfor %}{{ message.tool_call_id }}"
    "<|im_end|>{% endfor %}{% if tools %}{{ tools | tojson(indent=2) }}{% endif %}{# 'tool' #}"
)
