/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * A hook for blocks that are freed past the per-CPU lists.
 */
#ifndef EBB_TRACKERS_DIRECT_H
#define EBB_TRACKERS_DIRECT_H

#include <linux/types.h>

struct page;

/**
 * ebb_direct_hook_add() - call a function for blocks that are freed directly
 * @freed: called with preemption off, or in the section of a tracepoint, before
 *	the block is free. It may be called for other blocks, too.
 *
 * One function at a time. Sleeps. Return: 0 or an error.
 */
int ebb_direct_hook_add(void (*freed)(struct page *page, unsigned int order));

/* The caller waits for sections of tracepoints; those of a probe have ended. Sleeps. */
void ebb_direct_hook_remove(void);

/* Whether a probe calls the function: only for blocks that are freed directly. */
bool ebb_direct_hook_is_probe(void);

/* Calls that the probe has missed, because another probe's handler was interrupted. */
unsigned long ebb_direct_hook_missed(void);

#endif
