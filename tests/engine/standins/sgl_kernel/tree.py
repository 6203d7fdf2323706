"""The token tree of EAGLE: build, verify greedily, read the result."""

from __future__ import annotations

import torch

FULL_MASK = 0


def build_tree_kernel_efficient_cpu(
    parent_list: torch.Tensor,
    selected_index: torch.Tensor,
    seq_lens: torch.Tensor,
    tree_mask: torch.Tensor,
    positions: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    topk: int,
    depth: int,
    num_tokens: int,
    mask_mode: int,
) -> None:
    """Links, positions and mask of a tree of `num_tokens` nodes per request; node 0 is the root."""
    full_mask = int(mask_mode) == FULL_MASK
    parents, selected = parent_list.tolist(), selected_index.tolist()
    offset = 0
    for request, seq_len in enumerate(seq_lens.tolist()):
        parent = _parents(parents[request], selected[request], topk, num_tokens)
        next_token, next_sibling = [-1] * num_tokens, [-1] * num_tokens
        for node in range(num_tokens - 1, 0, -1):
            above = parent[node]
            if above >= 0:
                next_sibling[node] = next_token[above]
                next_token[above] = node
        mask = torch.zeros(num_tokens, num_tokens, dtype=torch.bool)
        mask[:, 0] = True
        depths = []
        for node in range(num_tokens):
            level, current = 0, node
            while current > 0:
                mask[node, current] = True
                level, current = level + 1, parent[current]
            depths.append(seq_len + level)
        first = request * num_tokens
        retrieve_index[request] = torch.arange(first, first + num_tokens)
        retrieve_next_token[request] = torch.tensor(next_token)
        retrieve_next_sibling[request] = torch.tensor(next_sibling)
        positions[first : first + num_tokens] = torch.tensor(depths)
        row = seq_len + num_tokens if full_mask else num_tokens
        block = tree_mask[offset : offset + num_tokens * row].view(num_tokens, row)
        block[:, row - num_tokens :] = mask
        offset += num_tokens * row


def _parents(parent_list: list[int], selected: list[int], topk: int, num_tokens: int) -> list[int]:
    node_of = {candidate: node for node, candidate in enumerate(selected, start=1)}
    parent = [-1]
    for node in range(1, num_tokens):
        level = selected[node - 1] // topk
        parent.append(0 if level == 0 else node_of.get(parent_list[level], -1))
    return parent


def verify_tree_greedy_cpu(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    target_predict: torch.Tensor,
) -> None:
    """Walk down from the root as long as a child carries the token that the target predicts."""
    target = target_predict.flatten().tolist()
    tokens, index = candidates.tolist(), retrive_index.tolist()
    next_token, next_sibling = retrive_next_token.tolist(), retrive_next_sibling.tolist()
    for request in range(len(tokens)):
        node, accepted = 0, [index[request][0]]
        while len(accepted) < accept_index.shape[1]:
            wanted = target[accepted[-1]]
            node = next_token[request][node]
            while node != -1 and tokens[request][node] != wanted:
                node = next_sibling[request][node]
            if node == -1:
                break
            accepted.append(index[request][node])
        accept_token_num[request] = len(accepted) - 1
        accept_index[request, : len(accepted)] = torch.tensor(accepted, dtype=accept_index.dtype)
        for position in accepted:
            predicts[position] = target[position]


def fill_bonus_tokens_cpu(
    accept_tokens: torch.Tensor,
    accept_lens: torch.Tensor,
    bonus_tokens: torch.Tensor,
    accept_stride: int,
) -> None:
    """The last accepted token of each request."""
    last = torch.arange(accept_lens.shape[0]) * accept_stride + accept_lens.long() - 1
    bonus_tokens.copy_(accept_tokens.flatten()[last])


def fill_accept_out_cache_loc_cpu(
    accept_index: torch.Tensor, out_cache_loc: torch.Tensor, accept_out_cache_loc: torch.Tensor
) -> None:
    """The slots of the accepted tokens, packed to the front."""
    accepted = accept_index.flatten()
    accepted = accepted[accepted > -1].long()
    accept_out_cache_loc[: accepted.numel()] = out_cache_loc[accepted]


def build_draft_decode_metadata_cpu(
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    topk: int,
    num_steps: int,
    pool_len: int,
) -> torch.Tensor:
    """One table row for each draft branch: the shared prefix, then the slots of that branch."""
    table = req_to_token[req_pool_indices.long()]
    if topk == 1:
        return table
    prefix = seq_lens.long()[:, None, None]
    branch = torch.arange(topk)[:, None] * num_steps + torch.arange(num_steps)
    slots = table.gather(1, (prefix + branch).flatten(1)).view(-1, topk, num_steps)
    columns = (prefix + torch.arange(num_steps)).expand(-1, topk, -1)
    rows = table[:, None].repeat(1, topk, 1)
    return rows.scatter_(2, columns, slots).flatten(0, 1)
