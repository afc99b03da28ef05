"""The error tree: messages name field, value and way out; each class has a status and survives pickling."""

import pickle

import pytest

from phasor.core import errors
from phasor.core.errors import (
    CapacityError,
    ConfigError,
    InvalidRequestError,
    LinkMismatchError,
    ModelNotFoundError,
    PhasorError,
    TransferError,
    all_error_types,
)


def test_messages_name_field_value_and_way_out() -> None:
    assert str(ConfigError("port", 70000, "give 0 to 65535")) == "port=70000: give 0 to 65535"
    mismatch = LinkMismatchError("k_dtype", "float32", "bfloat16")
    assert "'k_dtype'" in str(mismatch)
    assert "'float32'" in str(mismatch)
    assert "'bfloat16'" in str(mismatch)
    assert "'gpt'" in str(ModelNotFoundError("gpt", "smollm2"))


def test_a_long_value_is_shortened_in_the_message_and_kept_in_the_field() -> None:
    error = InvalidRequestError("prompt", "x" * 1000, "too long")
    assert len(str(error)) < 120
    assert error.value == "x" * 1000


def test_user_errors_are_value_errors() -> None:
    assert isinstance(ConfigError("a", 1, "b"), ValueError)
    assert isinstance(InvalidRequestError("a", 1, "b"), ValueError)


def test_retryable_is_what_another_try_may_cure() -> None:
    retryable = {cls.__name__ for cls in all_error_types() if cls.retryable}
    assert retryable == {
        "CapacityError",
        "TransferError",
        "TransferTimeoutError",
        "StoreError",
        "WorkerLostError",
    }


def test_the_list_of_types_is_the_whole_module() -> None:
    defined = {
        value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, PhasorError)
    }
    assert defined <= set(all_error_types())
    assert all_error_types()[0] is PhasorError
    assert len(all_error_types()) == len(set(all_error_types()))


def test_pickling_keeps_a_keyword_field() -> None:
    again = pickle.loads(pickle.dumps(CapacityError("9 of 8 blocks", ever=True)))
    assert isinstance(again, CapacityError)
    assert again.ever is True
    assert str(again) == "9 of 8 blocks"


def test_a_family_can_be_caught_by_its_head() -> None:
    with pytest.raises(TransferError):
        raise LinkMismatchError("tier", 1.0, 2.0)
