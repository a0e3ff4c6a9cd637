# SPDX-License-Identifier: Apache-2.0
"""Sets how many random examples a test of hypothesis runs."""

import hypothesis


def examples(count: int) -> hypothesis.settings:
    """Run so many; a third of them where `--sample` chose the profile `sample`."""
    default = hypothesis.settings().max_examples
    is_sample = default == hypothesis.settings.get_profile("sample").max_examples
    return hypothesis.settings(max_examples=count // 3 if is_sample else count)
