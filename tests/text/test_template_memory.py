"""A chat template that would fill memory is refused, in each way that it has to do so."""

import tracemalloc
from typing import Any

import pytest
from jitney.errors import InvalidArgumentError
from jitney.text.chat_template import ChatTemplate

CHAT: list[dict[str, Any]] = [{"role": "user", "content": "Go."}]
LOOP = "{% set ns = namespace(x='xy', l=[1]) %}{% for i in range(99) %}"
LONG = "'y' * 100000"
TEXT = f"({LONG})"

LARGE = {
    "a product": "{{ 'x' * 10 ** 9 }}",
    "a product that Jinja would compute at once": "{{ 'x' * 1000000000 }}",
    "a product of a list": "{{ [0] * 10 ** 10 }}",
    "a product that is not shown": "{% set x = 'x' * 10 ** 9 %}",
    "a product in a loop's head": "{% for c in 'x' * 10 ** 9 %}{% break %}{% endfor %}",
    "a product as a default": "{{ x | default('x' * 1000000000) }}",
    "integers": LOOP.replace("'xy'", "9") + "{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "bytes of an integer": "{{ (5).to_bytes(10 ** 9, 'big') }}",
    "a method's width": "{{ 'x'.ljust(10 ** 9) }}",
    "a method by a filter": "{{ ('x' | attr('zfill'))(10 ** 9) }}",
    "a filter's width": "{{ 'x' | center(1000000000) }}",
    "a filter's width in a block": "{% filter center(1000000000) %}x{% endfilter %}",
    "tabs": "{{ '\\t'.expandtabs(tabsize=10 ** 9) }}",
    "a format": "{{ '{:1000000000}'.format(1) }}",
    "a format of a mapping": "{{ '{a:1000000000}'.format_map({'a': 1}) }}",
    "a computed width": "{{ '{:{}}'.format(1, 10 ** 9) }}",
    "a computed width, older": "{{ '%*d' % (10 ** 9, 1) }}",
    "an older format": "{{ '%1000000000d' % 1 }}",
    "an older format as a filter": "{{ '%.1000000000f' | format(1.0) }}",
    "a format with many fields": f"{{{{ ('{{0}}' * 100000).format({LONG}) }}}}",
    "replaced": f"{{{{ {TEXT}.replace('y', {LONG}) }}}}",
    "replaced between all characters": f"{{{{ {TEXT}.replace('', {LONG}) }}}}",
    "replaced by a filter": f"{{{{ {TEXT} | replace(new={LONG}, old='y') }}}}",
    "translated": f"{{{{ {TEXT}.translate({{121: {LONG}}}) }}}}",
    "joined": f"{{{{ {TEXT}.join(range(99999) | map('string')) }}}}",
    "joined by a filter": f"{{{{ range(99999) | join({LONG}) }}}}",
    "split": "{{ (',' * 60000000).split(',') | length }}",
    "split at spaces": "{{ (' x' * 30000000).split() | length }}",
    "characters": "{{ ('é' * 30000000) | list | length }}",
    "indented": f"{{{{ ('x\\n' * 100000) | indent({LONG}) }}}}",
    "indented JSON": f"{{{{ range(99999) | list | tojson(indent={LONG}) }}}}",
    "JSON with long separators": f"{{{{ range(99999) | list | tojson(separators=({LONG}, '')) }}}}",
    "rows": "{{ [1] | batch(10 ** 9, 0) | list | length }}",
    "lines": f"{{{{ {TEXT} | wordwrap(1, wrapstring={LONG}) }}}}",
    "links": f"{{{{ ('http://a.de ' * 100000) | urlize(rel={LONG}) }}}}",
    "digits": "{{ 1.5 | round(1000000000, 'floor') }}",
    "one value after the other": "{{ range(99999) | map('string') | map('center', 99999) | list }}",
    "values that macros hold": "{% set b = 'x' * 60000000 %}{% macro f(n) %}{% set y = b[n:] %}"
    "{{ f(n - 1) if n }}{{ y[:1] }}{% endmacro %}{{ f(99) }}",
    "texts of a macro's caller": "{% macro m() %}{% for i in range(99) %}{{ caller() }}{% endfor %}"
    "{% endmacro %}{% set x %}{% call m() %}{{ 'x' * 9999999 }}{% endcall %}{% endset %}",
    "doubled by ~": LOOP + "{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "doubled by +": LOOP + "{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "a doubled block": LOOP
    + "{% set b | upper | lower %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = b %}{% endfor %}",
    "doubled by a macro": "{% macro m(x) %}{{ x }}{{ x }}{% endmacro %}"
    + LOOP
    + "{% set ns.x = m(ns.x) %}{% endfor %}",
    "a list in itself": LOOP + "{% set ns.l = [ns.l, ns.l] %}{% endfor %}{{ ns.l }}",
    "a list in itself, compared": LOOP.replace("'xy'", "[1]")
    + "{% set ns.l = [ns.l, ns.l] %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.l == ns.x }}",
    "a key in itself": LOOP + "{% set ns.x = (ns.x, ns.x) %}{% endfor %}{{ {ns.x: 1} }}",
    "a mapping in itself": LOOP
    + "{% set ns.l = {'a': ns.l, 'b': ns.l} %}{% endfor %}{{ ns.l | tojson }}",
    "values in themselves": LOOP
    + "{% set ns.l = dict(a=ns.l, b=ns.l).values() %}{% endfor %}{{ ns.l | list }}",
    "a cycler's items": LOOP + "{% set ns.l = cycler(ns.l, ns.l).items %}{% endfor %}{{ ns.l }}",
    "a macro's arguments": "{% set ns = namespace(l=[1]) %}{% macro f() %}{% set ns.l = varargs %}"
    "{% endmacro %}{% for i in range(99) %}{{ f(ns.l, ns.l) }}{% endfor %}{{ ns.l }}",
}


@pytest.mark.parametrize("name", LARGE)
def test_a_template_that_fills_memory_is_refused_in_time(name: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(
            InvalidArgumentError, match=r"chat template (makes|holds|asks|computes|has)"
        ):
            ChatTemplate(LARGE[name], {}).render(CHAT, {}, most=10**6)
        most_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert most_bytes < 450 << 20


def test_what_a_template_has_dropped_does_not_count() -> None:
    """The texts have 800 MB together, of which one has to stay."""
    source = (
        "{% set ns = namespace(text='') %}{% for m in messages %}"
        "{% set ns.text = ns.text ~ m.content %}{% endfor %}{{ ns.text[-3:] }}"
    )
    chat = [{"role": "user", "content": "a" * 10_000}] * 400
    assert ChatTemplate(source, {}).render(chat, {}) == "aaa"


def test_a_large_chat_is_no_large_value() -> None:
    """Each filter and operator here takes all of it."""
    source = (
        "{% for m in messages %}{{ (m.content | trim).split('|')[0] | replace('a', 'b') }}"
        "{{ m | tojson | length }}{{ '%s' % m.content | length }}{% endfor %}"
    )
    content = "a" * 20_000_000
    text = ChatTemplate(source, {}).render([{"role": "user", "content": content}], {})
    assert text.startswith("bbb")
    assert text.endswith(f"b{len(content) + 31}{len(content)}")


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ '%s|%5.1f|%-3d|%%' % ('a', 1.25, 7) }}", "a|  1.2|7  |%"),
        ("{{ '{:>4}|{x}'.format('a', x=1) }}", "   a|1"),
        ("{{ '%d' | format(1700000000) }}", "1700000000"),
        ("{{ [1, 'a'] ~ none ~ 2 }}", "[1, 'a']None2"),
        ("{{ (1, 2)[1:] + (3,) }}{{ 'abc'[::-1] }}", "(2, 3)cba"),
        ("{{ ', '.join(['a', 'b'] | map('upper')) }}", "A, B"),
        ("{{ ['a', 'b'] | map('upper') | join('-') }}", "A-B"),
        ("{% set x | upper %}a{{ 1 }}{% endset %}{{ x }}", "A1"),
        ("{% filter upper | replace('A', 'b') %}a{% endfilter %}", "b"),
        ("{{ {'b': 1, 'a': [2]} | tojson(indent=1) }}", '{\n "b": 1,\n "a": [\n  2\n ]\n}'),
        ("{{ [{'a': 1}, {'a': 2}] | map(attribute='a') | sum }}", "3"),
        ("{{ 2 * 3 + 5 % 3 }}{{ [0] * 2 }}{{ 'ab' * 2 }}", "8[0, 0]abab"),
    ],
)
def test_what_is_small_is_as_in_jinja(source: str, text: str) -> None:
    assert ChatTemplate(source, {}).render(CHAT, {}) == text
