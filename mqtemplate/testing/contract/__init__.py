"""The promises of the port as tests, for every broker there is or will be.

A broker joins by one class::

    class TestMyBroker(BrokerContract):
        @pytest.fixture
        def under_test(self) -> Iterator[BrokerUnderTest]:
            with MyBroker(...) as broker:
                yield BrokerUnderTest(broker, pass_time=...)
"""

from mqtemplate.testing.contract.delays import DelayContract
from mqtemplate.testing.contract.finding import FindingContract
from mqtemplate.testing.contract.groups import GroupContract
from mqtemplate.testing.contract.pulling import PullContract
from mqtemplate.testing.contract.receiving import ReceiveContract
from mqtemplate.testing.contract.replies import ReplyContract
from mqtemplate.testing.contract.retries import RetryContract
from mqtemplate.testing.contract.selecting import SelectContract
from mqtemplate.testing.contract.sending import SendContract
from mqtemplate.testing.contract.steering import ScheduleChangeContract
from mqtemplate.testing.contract.transactions import TransactionContract
from mqtemplate.testing.contract.under_test import BrokerUnderTest
from mqtemplate.testing.contract.whole import BrokerContract

__all__ = [
    "BrokerContract",
    "BrokerUnderTest",
    "DelayContract",
    "FindingContract",
    "GroupContract",
    "PullContract",
    "ReceiveContract",
    "ReplyContract",
    "RetryContract",
    "ScheduleChangeContract",
    "SelectContract",
    "SendContract",
    "TransactionContract",
]
