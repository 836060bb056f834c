"""A transaction listener whose answers a test chooses."""

from __future__ import annotations

from typing import Any

from mqtemplate import Message, MessageExt, TransactionState, transaction_listener


@transaction_listener()
class Ledger:
    """A listener whose local transactions return or raise these answers, the last one for ever. A check commits."""

    def __init__(self, *answers: object) -> None:
        self.answers = list(answers or [TransactionState.COMMIT])
        self.executed: list[tuple[Message, object]] = []
        self.checked: list[MessageExt] = []

    def execute_local_transaction(self, message: Message, arg: object) -> Any:
        self.executed.append((message, arg))
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def check_local_transaction(self, message: MessageExt) -> TransactionState:
        self.checked.append(message)
        return TransactionState.COMMIT


async def check_async(self: object, message: Message) -> TransactionState:
    return TransactionState.COMMIT
