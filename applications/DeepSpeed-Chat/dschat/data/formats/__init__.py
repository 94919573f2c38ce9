# SPDX-License-Identifier: Apache-2.0
"""What a row may look like, and where it comes from: files, the hub, the published data sets."""
