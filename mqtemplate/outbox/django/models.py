"""Models of the tables, for migrations and for the admin. The statements are in `mqtemplate.outbox.database`."""

from __future__ import annotations

from django.db import models

from mqtemplate.outbox.database import INBOX, KEY_LENGTH, LEASE_TABLE, OUTBOX


class OutboxMessage(models.Model):  # type: ignore[misc]  # Django has no types
    """One message that is to be sent, or a change of the messages before it."""

    id = models.BigAutoField(primary_key=True)
    msg_id = models.CharField(max_length=64)
    topic = models.CharField(max_length=255)
    hash_key = models.TextField(null=True)
    properties = models.TextField()
    body = models.BinaryField()
    created_ms = models.BigIntegerField()
    error = models.TextField(null=True)
    change_key = models.CharField(max_length=KEY_LENGTH, null=True)

    class Meta:
        db_table = OUTBOX
        indexes = (
            # Messages are not in it, so that they cost nothing.
            models.Index(
                fields=("change_key",),
                condition=models.Q(change_key__isnull=False),
                name="mqtemplate_outbox_change_key",
            ),
        )

    def __str__(self) -> str:
        return (
            f"{self.id}: {self.topic} {self.msg_id}"
            if self.change_key is None
            else f"{self.id}: change of {self.change_key}"
        )


class OutboxLease(models.Model):  # type: ignore[misc]
    """The right to relay, of one process at a time."""

    id = models.IntegerField(primary_key=True)
    owner = models.CharField(max_length=64)
    until_ms = models.BigIntegerField()

    class Meta:
        db_table = LEASE_TABLE

    def __str__(self) -> str:
        return f"{self.owner} until {self.until_ms}"


class InboxMessage(models.Model):  # type: ignore[misc]
    """One message that has had its effect for a consumer."""

    # Django 5.2 has keys of several columns; this surrogate works with older versions too.
    id = models.BigAutoField(primary_key=True)
    consumer = models.CharField(max_length=255)
    msg_id = models.CharField(max_length=255)
    received_ms = models.BigIntegerField(db_index=True)

    class Meta:
        db_table = INBOX
        constraints = (models.UniqueConstraint(fields=("consumer", "msg_id"), name="mqtemplate_inbox_once"),)

    def __str__(self) -> str:
        return f"{self.consumer} {self.msg_id}"
