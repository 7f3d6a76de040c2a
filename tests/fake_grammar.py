"""A grammar without a language: which ids it allows, and which it forces, is arithmetic of the
output. Engines over the fake runner compile it, and ``solo_stream`` follows it."""

from tests.fake_tokens import VOCAB_SIZE


class FakeGrammar:
    """Made of a text ``"first,…:length"``: allows ids of which the remainder by 7 is one of the
    first after an even sum of the output, and all others after an odd one; complete after that many
    tokens. So every token of the output matters, and a state that missed one allows others. With
    ``:most`` at the end, a token forces up to so many after it, at times."""

    def __init__(self, text: str) -> None:
        remainders, length, *most = text.split(":")
        self.remainders = {int(each) for each in remainders.split(",")}
        self.length = int(length)
        self.most_forced = int(most[0]) if most else 0

    def begin(self, may_end: bool) -> "FakeState":
        return FakeState(self)


class FakeState:
    """See ``batch.GrammarState``."""

    def __init__(self, grammar: FakeGrammar) -> None:
        self.error: str | None = None
        self.accepted: list[int] = []
        self._grammar = grammar

    @property
    def ended(self) -> bool:
        return len(self.accepted) == self._grammar.length

    def accept(self, token_ids: list[int]) -> None:
        for token in token_ids:
            assert not self.ended, "a complete output goes on"
            assert token in self.allowed(VOCAB_SIZE), "a token that is not allowed"
            self.accepted.append(token)

    def forced(self) -> list[int]:
        ahead = self.after([])
        made: list[int] = []
        for _ in range(sum(self.accepted) % (self._grammar.most_forced + 1)):
            if not ahead.ended:
                made.append(ahead.allowed(VOCAB_SIZE)[sum(ahead.accepted) % 3])
                ahead.accept(made[-1:])
        return made

    def num_allowed(self, token_ids: list[int]) -> int:
        ahead = self.after([])
        for count, token in enumerate(token_ids):
            if ahead.ended or token not in ahead.allowed(VOCAB_SIZE):
                return count
            ahead.accept([token])
        return len(token_ids)

    def after(self, token_ids: list[int]) -> "FakeState":
        state = FakeState(self._grammar)
        state.accept(self.accepted + token_ids)
        return state

    def allowed(self, vocab_size: int) -> list[int]:
        """The ids below ``vocab_size`` that may come next."""
        odd = sum(self.accepted) % 2
        return [id for id in range(vocab_size) if (id % 7 in self._grammar.remainders) != bool(odd)]

    def mask(self) -> bytes:
        bits = sum(1 << id for id in self.allowed(VOCAB_SIZE))
        return bits.to_bytes(-(-VOCAB_SIZE // 32) * 4, "little")
