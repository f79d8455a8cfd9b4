/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * What all trackers count. All counts but that of isolated blocks begin anew
 * when a tracker starts.
 */
#ifndef EBB_BALLOON_COUNTS_H
#define EBB_BALLOON_COUNTS_H

#include <linux/atomic.h>

/*
 * struct ebb_counts - counts of isolated and reported blocks
 * @isolated_blocks: taken out of the allocator, ever
 * @isolated_pages: the same in pages
 * @isolated_now: blocks that are out of the allocator at the moment
 * @isolated_most: most of those at a time
 * @reported_blocks: named to the host, which answered well
 * @reported_pages: the same in pages
 * @false_isolations: what was written down and is not free any more
 * @low_memory: how often a pass left a zone alone because it is short of memory
 * @passes: passes over arrays, bitmaps or free lists
 * @report_errors: reports that failed; their blocks went back as they came
 */
struct ebb_counts {
	atomic64_t isolated_blocks;
	atomic64_t isolated_pages;
	atomic64_t isolated_now;
	atomic64_t isolated_most;
	atomic64_t reported_blocks;
	atomic64_t reported_pages;
	atomic64_t false_isolations;
	atomic64_t low_memory;
	atomic64_t passes;
	atomic64_t report_errors;
};

extern struct ebb_counts ebb_counts;

/* Blocks leave the allocator. In any context. */
static inline void ebb_count_isolated(unsigned int blocks, unsigned long pages)
{
	s64 now = atomic64_add_return(blocks, &ebb_counts.isolated_now);
	s64 most = atomic64_read(&ebb_counts.isolated_most);

	while (most < now && !atomic64_try_cmpxchg(&ebb_counts.isolated_most, &most, now))
		;
	atomic64_add(blocks, &ebb_counts.isolated_blocks);
	atomic64_add(pages, &ebb_counts.isolated_pages);
}

#endif
