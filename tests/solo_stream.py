"""What a request must get from an engine over the fake runner, told without engine and runner."""

from itertools import takewhile

from jitney.messages import Submit

from tests.fake_grammar import FakeGrammar
from tests.fake_tokens import VOCAB_SIZE, context, next_slot, pick, reads_output


def solo_stream(
    submit: Submit, index: int = 0, *, max_model_len: int = 1 << 30, vocab_size: int = VOCAB_SIZE
) -> list[int]:
    """The tokens that sequence ``index`` of the request must get, whatever runs beside it."""
    params = submit.params
    most = min(params.max_tokens, max_model_len - len(submit.prompt))
    output: list[int] = []
    slots = context(submit.prompt, params.lora_name)
    grammar = FakeGrammar(submit.grammar).begin(True) if submit.grammar else None
    due: list[int] = []  # what the grammar forces, but for stop ids
    while len(output) < most:
        history = sorted(output) if reads_output(params, submit.bad_words_ids) else None
        allowed = range(vocab_size) if grammar is None else grammar.allowed(vocab_size)
        was_sampled = not due
        sampled = allowed[pick(slots, params, index, history) % len(allowed)]
        token = sampled if was_sampled else due.pop(0)
        output.append(token)
        slots.append(next_slot(slots, token, params.lora_name))
        if token in submit.stop_ids and len(output) > params.min_tokens:
            break
        if grammar is not None:
            grammar.accept([token])
            if grammar.ended:
                break
            if was_sampled and params.logprobs is None and not submit.bad_words_ids:
                free = takewhile(lambda token: token not in submit.stop_ids, grammar.forced())
                due = list(free)
    return output
