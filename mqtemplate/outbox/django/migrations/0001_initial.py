"""The three tables."""

from __future__ import annotations

from django.db import migrations, models


class Migration(migrations.Migration):  # type: ignore[misc]  # Django has no types
    """Create the tables of outbox and inbox."""

    initial = True

    dependencies = ()

    operations = (
        migrations.CreateModel(
            name="OutboxLease",
            fields=[
                ("id", models.IntegerField(primary_key=True, serialize=False)),
                ("owner", models.CharField(max_length=64)),
                ("until_ms", models.BigIntegerField()),
            ],
            options={
                "db_table": "mqtemplate_outbox_lease",
            },
        ),
        migrations.CreateModel(
            name="OutboxMessage",
            fields=[
                ("id", models.BigAutoField(primary_key=True, serialize=False)),
                ("msg_id", models.CharField(max_length=64)),
                ("topic", models.CharField(max_length=255)),
                ("hash_key", models.TextField(null=True)),
                ("properties", models.TextField()),
                ("body", models.BinaryField()),
                ("created_ms", models.BigIntegerField()),
                ("error", models.TextField(null=True)),
            ],
            options={
                "db_table": "mqtemplate_outbox",
            },
        ),
        migrations.CreateModel(
            name="InboxMessage",
            fields=[
                ("id", models.BigAutoField(primary_key=True, serialize=False)),
                ("consumer", models.CharField(max_length=255)),
                ("msg_id", models.CharField(max_length=255)),
                ("received_ms", models.BigIntegerField(db_index=True)),
            ],
            options={
                "db_table": "mqtemplate_inbox",
                "constraints": [models.UniqueConstraint(fields=("consumer", "msg_id"), name="mqtemplate_inbox_once")],
            },
        ),
    )
