"""The columns that a job names: those of the input that it needs, and those of its result. They are
checked before the model is loaded and before anything is written."""

import re
from collections.abc import Collection, Mapping, Sequence

import jinja2
import jinja2.meta
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jitney.errors import InvalidArgumentError, nearest

from jitney_jobs.arrow import pa
from jitney_jobs.job import Job
from jitney_jobs.json_lines import check_no_common_name
from jitney_jobs.nested import source_column

FIELD = re.compile(r"\{\{|\}\}|\{([^{}]*)\}")
"""In a prompt's text: a doubled brace, which stands for one, or a column's name in braces."""
_RESULTS = {
    "generate": ["output", "finish_reason", "prompt_tokens", "output_tokens"],
    "embed": ["embedding"],
    "classify": ["label", "score"],
    "score": ["score"],
}
"""The result's columns of each task, as they are called unless the job names them."""
_MOST_NAMES = 20


def result_names(job: Job, fields: pa.Schema | None) -> dict[str, str]:
    """Each column of the result, and what it is called in the output: with the setting
    ``output_column`` the first has that name, and the names of the others begin with it."""
    names = [] if fields is None else fields.names
    return _named(job, names)


def _named(job: Job, names: list[str]) -> dict[str, str]:
    own = job.output_column
    if own is None:
        return {name: name for name in names}
    return {name: own if name == names[0] else f"{own}_{name}" for name in names}


def needed_columns(job: Job) -> dict[str, str]:
    """The columns of the input that a job names: each with the setting that names it. Those of a
    model with several inputs are not among them."""
    if job.input_format == "openai":
        return {}
    if job.task == "map":
        return dict.fromkeys(job.map_column, "map_column")
    needed = dict.fromkeys(job.sampling_column, "sampling_column")
    if job.template is not None:
        return needed | dict.fromkeys(_names_of_template(job.template), "template")
    if job.prompt is not None:
        names = [match[1] for match in FIELD.finditer(job.prompt) if match[1] is not None]
        return needed | dict.fromkeys(names, "prompt")
    if job.task == "generate":
        needed[job.column] = "column"
    return needed


def _names_of_template(template: str) -> list[str]:
    """The names that it cannot do without. Those that it asks for (``is defined``), or that have a
    default, may be missing."""
    environment = ImmutableSandboxedEnvironment()
    try:
        tree = environment.parse(template)
    except jinja2.TemplateError as error:
        raise InvalidArgumentError(f"template cannot be used: {error}") from None
    optional: set[str] = set()
    for node in tree.find_all((jinja2.nodes.Test, jinja2.nodes.Filter)):
        may_be_missing = node.name in ("defined", "undefined", "default", "d")
        if may_be_missing and isinstance(node.node, jinja2.nodes.Name):
            optional.add(node.node.name)
    return sorted(jinja2.meta.find_undeclared_variables(tree) - optional)


def check_columns(job: Job, there: Collection[str]) -> None:
    """Raises InvalidArgumentError if a column that the job needs is not ``there``, in the input, or
    if one of the result is."""
    check_there(needed_columns(job), there)
    check_there(dict.fromkeys(job.keep or [], "keep"), there)
    kept = there if job.keep is None else set(job.keep)
    if job.input_format != "openai":
        check_no_common_name(list(kept), list(_named(job, _RESULTS.get(job.task, [])).values()))


def check_there(needed: Mapping[str, str], there: Collection[str]) -> None:
    """``needed``: columns, each with what names it. Raises InvalidArgumentError."""
    for name, setting in needed.items():
        if not _is_there(name, there):
            known = ", ".join(sorted(there)[:_MOST_NAMES])
            hint = nearest(name, there)
            raise InvalidArgumentError(
                f"{setting} names column {name!r}, which the input does not have{hint}; "
                f"it has {known}"
            )


def check_any_there(names: Sequence[str], there: Collection[str]) -> None:
    """``names``: columns of which the model takes one or several. Raises InvalidArgumentError if
    none is there."""
    if not any(_is_there(name, there) for name in names):
        known = ", ".join(sorted(there)[:_MOST_NAMES])
        wanted = " or ".join(names)
        raise InvalidArgumentError(f"the model takes column {wanted}; the input has {known}")


def _is_there(name: str, there: Collection[str]) -> bool:
    """Also a value inside of a column: ``doc.text``."""
    return source_column(name, there) is not None
