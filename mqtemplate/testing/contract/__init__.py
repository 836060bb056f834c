"""Contract suite: the guarantees of the `Broker` interface as tests, for brokers of this project and of users.

A broker is tested by one class::

    class TestMyBroker(BrokerContract):
        @pytest.fixture
        def under_test(self) -> Iterator[BrokerUnderTest]:
            with MyBroker(...) as broker:
                yield BrokerUnderTest.on_real_clock(broker)
"""

from mqtemplate.testing.contract.broker_contract import BrokerContract
from mqtemplate.testing.contract.delays import DelayContract
from mqtemplate.testing.contract.groups import GroupContract
from mqtemplate.testing.contract.pulling import PullContract
from mqtemplate.testing.contract.queries import QueryContract
from mqtemplate.testing.contract.receiving import ReceiveContract
from mqtemplate.testing.contract.replies import ReplyContract
from mqtemplate.testing.contract.retries import RetryContract
from mqtemplate.testing.contract.schedule_changes import ScheduleChangeContract
from mqtemplate.testing.contract.selectors import SelectorContract
from mqtemplate.testing.contract.sending import SendContract
from mqtemplate.testing.contract.sequenced_sends import SequencedSendContract
from mqtemplate.testing.contract.transactions import TransactionContract
from mqtemplate.testing.contract.under_test import BrokerUnderTest

__all__ = [
    "BrokerContract",
    "BrokerUnderTest",
    "DelayContract",
    "GroupContract",
    "PullContract",
    "QueryContract",
    "ReceiveContract",
    "ReplyContract",
    "RetryContract",
    "ScheduleChangeContract",
    "SelectorContract",
    "SendContract",
    "SequencedSendContract",
    "TransactionContract",
]
