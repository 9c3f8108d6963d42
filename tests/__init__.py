import pytest

pytest.register_assert_rewrite("tests.helpers")  # a failed assertion in a helper shows its values, too
