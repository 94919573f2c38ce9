# SPDX-License-Identifier: Apache-2.0
"""People as judges: sessions of votes in a terminal or on a page."""
