"""The table of the tasks."""

from __future__ import annotations

from django.db import migrations, models


class Migration(migrations.Migration):  # type: ignore[misc]  # Django has no types
    """Create the table of the tasks."""

    initial = True

    dependencies = ()

    operations = (
        migrations.CreateModel(
            name="TaskRecord",
            fields=[
                ("id", models.CharField(max_length=64, primary_key=True, serialize=False)),
                ("status", models.CharField(default="READY", max_length=10)),
                ("task_path", models.TextField()),
                ("args", models.JSONField()),
                ("kwargs", models.JSONField()),
                ("priority", models.SmallIntegerField()),
                ("queue_name", models.TextField()),
                ("backend_name", models.TextField()),
                ("run_after", models.DateTimeField(null=True)),
                ("enqueued_at", models.DateTimeField()),
                ("started_at", models.DateTimeField(null=True)),
                ("last_attempted_at", models.DateTimeField(null=True)),
                ("finished_at", models.DateTimeField(db_index=True, null=True)),
                ("worker_ids", models.JSONField(default=list)),
                ("errors", models.JSONField(default=list)),
                ("return_value", models.JSONField(null=True)),
            ],
            options={
                "db_table": "mqtemplate_task",
            },
        ),
    )
