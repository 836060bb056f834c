"""Mails to customers."""

from __future__ import annotations

from mqtemplate import CircuitBreaker, MessageExt, message_listener, service

from .messages import Mail


@service
class MailServer:
    """Stand-in for a mail server: it prints. Like a real one it may be down, and it knows what it has sent.

    Attributes:
        sent: The mails, oldest first.
    """

    def __init__(self) -> None:
        self.is_down = False
        self.sent: list[Mail] = []
        self._keys: set[str] = set()

    def send(self, mail: Mail, idempotency_key: str) -> None:
        """Send a mail, once for each key.

        Raises:
            ConnectionError: The server is down.
        """
        if self.is_down:
            raise ConnectionError("the mail server does not answer")
        if idempotency_key not in self._keys:
            self._keys.add(idempotency_key)
            self.sent.append(mail)
            print(f"    mail to {mail.to}: {mail.text}", flush=True)


class MailServerBreaker(CircuitBreaker):
    """Pauses the mailer while the mail server is down, so that an outage uses up no retries."""

    def __init__(self) -> None:
        super().__init__(failures=2, pause="1m", errors=OSError, name="mail server")


@message_listener(topic="mails", consumer_group="mailer", middlewares=[MailServerBreaker])
def deliver(mail: Mail, server: MailServer, message: MessageExt) -> None:
    """Send a mail. The message id is the same in each attempt, so a repeat sends no second mail."""
    server.send(mail, idempotency_key=message.msg_id)
