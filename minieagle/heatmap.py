"""The doctor's report as one HTML page: a heat map of readings by depth, with nothing fetched from anywhere.

The one idea: a fault has a shape (all depths low, or only those behind the first), which a picture shows at once. Drawn
as inline SVG from the report's JSON; text is escaped by the template engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jinja2 import Environment

ROW, LEFT, CELL = 20, 330, 62

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>minieagle doctor: {{ report.verdict }}</title>
<style>
body { font: 14px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 60em; padding: 0 1em; color: #222 }
svg text { font: 12px system-ui, sans-serif } .fault, .refused { color: #a00 } .healthy { color: #070 }
</style></head><body>
<h1 class="{{ report.verdict }}">minieagle doctor: {{ report.verdict }}</h1>
<p>target {{ report.model }}<br>drafter {{ report.drafter }}<br>{{ report.num_positions }} positions</p>
{% if report.refusal %}<p class="refused">{{ report.refusal }}</p>{% endif %}
{% if report.undecided %}<p>undecided: {{ report.undecided }}</p>{% endif %}
{% if report.causes %}<h2>Causes, likeliest first</h2><ol>
{% for cause in report.causes %}<li>{{ cause.cause }}: {{ cause.remedy }}
{%- if cause.gain %} ({{ "%+.2f" | format(cause.gain) }} &plusmn; {{ "%.2f" | format(cause.error) }} tokens per step)
{%- endif %}</li>
{% endfor %}</ol>{% endif %}
{% if report.alike %}<p>Can't be told from "{{ report.best }}" by this text: {{ report.alike | join(", ") }}</p>
{% endif %}
{% for note in report.notes %}<p>{{ note }}</p>{% endfor %}
{% if report.findings %}<h2>Seen</h2><ul>
{% for finding in report.findings %}<li{% if finding.is_fault %} class="fault"{% endif %}>{{ finding.sentence }}</li>
{% endfor %}</ul>{% endif %}
{% if report.readings %}<h2>Agreement with the target, by reading and depth</h2>
<svg width="{{ width }}" height="{{ height }}" role="img" aria-label="agreement by reading and depth">
{% for depth in range(1, num_depths + 1) %}
<text x="{{ left + (depth - 0.5) * cell }}" y="14" text-anchor="middle">depth {{ depth }}</text>
{% endfor %}<text x="{{ left + num_depths * cell + 10 }}" y="14">gain, tokens per step</text>
{% for reading in report.readings %}{% set y = row * (loop.index0 + 1) %}
<text x="{{ left - 8 }}" y="{{ y + 14 }}" text-anchor="end"
{%- if reading.reading == "as wired" %} font-weight="bold"{% endif %}
{%- if reading.ruled_out %} opacity="0.5"{% endif %}>
{{- reading.reading | truncate(52) }}
{%- if reading.ruled_out %}<title>ruled out: {{ reading.ruled_out }}</title>{% endif %}</text>
{% for rate in reading.agreement_by_depth %}{% set x = left + loop.index0 * cell %}
<rect x="{{ x }}" y="{{ y }}" width="{{ cell - 1 }}" height="{{ row - 1 }}"
 fill="hsl({{ (rate * 130) | round | int }}, 60%, 72%)"></rect>
<text x="{{ x + cell / 2 }}" y="{{ y + 14 }}" text-anchor="middle">{{ "%.2f" | format(rate) }}</text>
{% endfor %}<text x="{{ left + num_depths * cell + 10 }}" y="{{ y + 14 }}">
{{- "%+.2f" | format(reading.gain) }} &plusmn; {{ "%.2f" | format(reading.error) }}</text>
{% endfor %}</svg>{% endif %}
<ul>{% for note in report.meaning %}<li>{{ note }}</li>{% endfor %}</ul>
</body></html>
"""


def page(report: Mapping[str, Any]) -> str:
    """The page for a report's JSON."""
    readings = report["readings"]
    num_depths = len(readings[0]["agreement_by_depth"]) if readings else 0
    template = Environment(autoescape=True).from_string(_PAGE)
    return template.render(
        report=report,
        num_depths=num_depths,
        row=ROW,
        left=LEFT,
        cell=CELL,
        width=LEFT + num_depths * CELL + 180,
        height=ROW * (len(readings) + 1),
    )
