"""The command ``jitney plan``, whose prompts may stand in the files of a job. The command itself is
``jitney_measure.plan_command``'s, which knows no such files."""

from jitney_measure import plan_command


def _prompt_lengths(source: str, column: str, model: str) -> list[int]:
    from jitney_jobs.generate import prompt_lengths  # slow to import

    return prompt_lengths(source, column, model)


plan = plan_command.command(_prompt_lengths)
