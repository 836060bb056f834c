"""Progress of a plain stream, shown as the committed offsets of its group."""

from __future__ import annotations

from mqtemplate.errors import MQTemplateError
from mqtemplate.event_log import get_logger
from mqtemplate.message import MessageQueue
from mqtemplate.spark.broker_access.connection import open_local_server
from mqtemplate.spark.offsets import OffsetTable

_log = get_logger("mqtemplate.spark")


def commit_group_offsets(store: str, group: str, end: OffsetTable) -> bool:
    """Commit the end of a batch for a group, but no lower offset than before, as a repeated batch would.

    The checkpoint has the progress, so a failure is only logged.

    Returns:
        False if no `LocalServer` runs for the folder, or it did not answer.
    """
    try:
        with open_local_server(store) as broker:
            if broker is None:
                return False
            for read, offset in sorted(end.items()):
                queue = MessageQueue(read.topic, broker.name, read.queue_id)
                if offset > (broker.committed_offset(group, queue) or 0):
                    broker.commit_offset(group, queue, offset)
    except MQTemplateError as exc:
        _log.warning("spark.group_not_committed", group=group, reason=str(exc))
        return False
    return True
