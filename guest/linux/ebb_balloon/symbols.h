/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Kernel functions that are global but not exported.
 */
#ifndef EBB_BALLOON_SYMBOLS_H
#define EBB_BALLOON_SYMBOLS_H

#include <linux/mm.h>
#include <linux/mmzone.h>

#include "compat.h"

/**
 * struct ebb_symbols - functions of mm/page_alloc.c
 * @isolate_free_page: __isolate_free_page(): takes a whole free block off its
 *	list. Under the zone's lock. 0 if the zone is short of memory.
 * @putback_isolated_page: __putback_isolated_page(): the way back. Under the
 *	zone's lock, with the migrate type that the page block has then.
 * @migratetype: get_pfnblock_migratetype(), or get_pfnblock_flags_mask() of
 *	kernels before 6.17
 * @drain_all_pages: drain_all_pages(): puts the pages in the lists of processors
 *	on the free lists. NULL stands for all zones. Sleeps.
 */
struct ebb_symbols {
	int (*isolate_free_page)(struct page *page, unsigned int order);
	void (*putback_isolated_page)(struct page *page, unsigned int order, int mt);
#ifdef EBB_PAGEBLOCK_FLAGS
	typeof(get_pfnblock_flags_mask) *migratetype;
#else
	typeof(get_pfnblock_migratetype) *migratetype;
#endif
	void (*drain_all_pages)(struct zone *zone);
};

/* Filled in by ebb_symbols_find(); all or nothing. */
extern struct ebb_symbols ebb_symbols;

/**
 * ebb_symbols_find() - look the functions up, once
 *
 * May sleep. Return: 0, or -EOPNOTSUPP after one line in the log that says why. Parameter direct=0
 * leaves it out.
 */
int ebb_symbols_find(void);

/* Migrate type of the page block that @page is in. After ebb_symbols_find(). */
static inline int ebb_migratetype(const struct page *page)
{
#ifdef EBB_PAGEBLOCK_FLAGS
	return ebb_symbols.migratetype(page, page_to_pfn(page), MIGRATETYPE_MASK);
#else
	return ebb_symbols.migratetype(page, page_to_pfn(page));
#endif
}

#endif
