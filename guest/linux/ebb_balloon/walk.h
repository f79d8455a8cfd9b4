/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * A walk over the free blocks of all zones.
 */
#ifndef EBB_BALLOON_WALK_H
#define EBB_BALLOON_WALK_H

#include <linux/mutex.h>
#include <linux/notifier.h>

#include "tracker.h"

struct ebb_balloon;

/* Most blocks that are found in one step. */
#define EBB_WALK_BLOCKS	256

/**
 * struct ebb_walk - a walk in steps, which may be begun again at any time
 * @eb: the device whose counters it keeps
 * @order: smallest blocks of interest
 * @node: where the walk is; MAX_NUMNODES at its end
 * @zone: the zone of that node
 * @pfn: the next page
 * @found: blocks that the last step found, all of one zone
 * @found_nr: how many
 * @stepping: held while page structures are looked at
 * @notifier: waits for steps over memory that goes away
 * @notified: it was registered
 */
struct ebb_walk {
	struct ebb_balloon *eb;
	unsigned int order;
	int node;
	int zone;
	unsigned long pfn;
	struct ebb_block found[EBB_WALK_BLOCKS];
	unsigned int found_nr;
	struct mutex stepping;
	struct notifier_block notifier;
	bool notified;
};

int ebb_walk_init(struct ebb_walk *walk, struct ebb_balloon *eb);
void ebb_walk_exit(struct ebb_walk *walk);
void ebb_walk_begin(struct ebb_walk *walk, unsigned int page_shift);
bool ebb_walk_step(struct ebb_walk *walk);

#endif
