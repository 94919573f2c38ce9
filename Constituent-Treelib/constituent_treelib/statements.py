# SPDX-License-Identifier: Apache-2.0
"""A program's syntax tree, cut into statements.

A simple statement is one node of the grammar. A compound one is taken apart: what stands before its body, the head
("def f(x):"), is a statement of its own, the body's statements follow, and what stands behind the body (another head
such as "else:", a closing brace) comes last. What the parser could not read is cut into its lines.
"""

from constituent_treelib.trees import Tree

ERROR = "ERROR"  # label of what the parser could not read
# Nodes whose children are statements, in the grammars of Python, C, C++, Java, JavaScript, Go, Rust and their like.
_BODIES = frozenset(
    "module program source_file translation_unit block statement_block statement_list compound_statement class_body "
    "declaration_list field_declaration_list enum_body interface_body switch_body body_statement".split()
)


def statements(program: Tree, text: str) -> list[Tree]:
    """The statements of a program, with the heads of compound ones, from left to right."""
    apart = _taken_apart(program, text)
    found: list[Tree] = []
    waiting = [program]
    while waiting:
        node = waiting.pop()
        if id(node) in apart:
            is_body = node.label in _BODIES or (node is program and node.label != ERROR)
            waiting.extend(reversed(node.children if is_body else _pieces(node, apart, text)))
        elif found and _is_mark(node):  # a closing brace, a semicolon: belongs to the statement before
            before = found.pop()
            found.append(Tree(before.label, before.start, node.end, (before, node)))
        else:
            found.append(node)
    return found


def _taken_apart(program: Tree, text: str) -> set[int]:
    """ids of the nodes that are no single statement.

    The program, bodies, errors of several lines in them (and in such errors), and all that holds one of these.
    """
    nodes = program.nodes()
    apart = {id(program)}
    for node in nodes:  # each before its children, so that errors in errors are found
        if id(node) in apart or node.label in _BODIES:
            errors = [child for child in node.children if child.label == ERROR and child.children]
            apart.update(id(error) for error in errors if "\n" in text[error.start : error.end])
    for node in reversed(nodes):  # each after its children
        if node.children and (node.label in _BODIES or any(id(child) in apart for child in node.children)):
            apart.add(id(node))
    return apart


def _pieces(node: Tree, apart: set[int], text: str) -> list[Tree]:
    """The children that are taken apart further, and runs of the others between them; a line of an error is a run."""
    runs: list[list[Tree]] = []
    for child in node.children:
        last = runs[-1][-1] if runs else None
        if last is None or id(child) in apart or id(last) in apart:
            runs.append([child])
        elif node.label == ERROR and "\n" in text[last.end : child.start]:
            runs.append([child])
        else:
            runs[-1].append(child)
    return [run[0] if id(run[0]) in apart else Tree(node.label, run[0].start, run[-1].end, tuple(run)) for run in runs]


def _is_mark(node: Tree) -> bool:
    """Whether a statement is nothing but marks. A node of the grammar without a name is labelled by what it says."""
    return all(leaf.label and not any(char.isalnum() for char in leaf.label) for leaf in node.leaves())
