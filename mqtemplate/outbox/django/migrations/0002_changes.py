"""Changes of messages: cancels and reschedules."""

from __future__ import annotations

from django.db import migrations, models


class Migration(migrations.Migration):  # type: ignore[misc]  # Django has no types
    """Add the key of a change to the rows of the outbox."""

    dependencies = (("mqtemplate_outbox", "0001_initial"),)

    operations = (
        migrations.AddField(
            model_name="outboxmessage",
            name="change_key",
            field=models.CharField(max_length=255, null=True),
        ),
        migrations.AddIndex(
            model_name="outboxmessage",
            index=models.Index(
                fields=["change_key"],
                condition=models.Q(("change_key__isnull", False)),
                name="mqtemplate_outbox_change_key",
            ),
        ),
    )
