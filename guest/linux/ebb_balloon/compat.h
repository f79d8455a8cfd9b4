/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Differences between the kernels that the module is built for (6.1, 6.12, 7.3).
 */
#ifndef EBB_BALLOON_COMPAT_H
#define EBB_BALLOON_COMPAT_H

#if __has_include(<linux/balloon.h>)
#include <linux/balloon.h>
/* The kernel inserts and removes pages that compaction moves, under a lock of its own. */
#define EBB_KERNEL_MOVES
#else
#include <linux/balloon_compaction.h>
#endif
#include <linux/mmzone.h>
#include <linux/page_reporting.h>
#include <linux/version.h>

#if defined(CONFIG_BALLOON_COMPACTION) || defined(CONFIG_BALLOON_MIGRATION)
#define EBB_PAGES_MOVE
#define EBB_PAGE_FLAGS GFP_HIGHUSER_MOVABLE
#else
#define EBB_PAGE_FLAGS GFP_HIGHUSER
#endif

/* Largest order of the page allocator. */
#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 8, 0)
#define EBB_LARGEST_ORDER MAX_PAGE_ORDER
#elif LINUX_VERSION_CODE >= KERNEL_VERSION(6, 4, 0)
#define EBB_LARGEST_ORDER MAX_ORDER
#else
#define EBB_LARGEST_ORDER (MAX_ORDER - 1)
#endif

/* Shrinkers are allocated by the kernel. */
#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 7, 0)
#define EBB_ALLOCATED_SHRINKER
#endif

/* Order of a reporting device that leaves it to the kernel; 0 in older kernels. */
#ifdef PAGE_REPORTING_ORDER_UNSPECIFIED
#define EBB_REPORTING_ORDER_UNSPECIFIED PAGE_REPORTING_ORDER_UNSPECIFIED
#else
#define EBB_REPORTING_ORDER_UNSPECIFIED 0
#endif

/* A page block's migrate type is a part of its flags. */
#if LINUX_VERSION_CODE < KERNEL_VERSION(6, 17, 0)
#define EBB_PAGEBLOCK_FLAGS
#define EBB_MIGRATETYPE_FUNCTION "get_pfnblock_flags_mask"
#else
#define EBB_MIGRATETYPE_FUNCTION "get_pfnblock_migratetype"
#endif

/* Names and callbacks of virtqueues are in one structure. */
#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 11, 0)
#define EBB_VIRTQUEUE_INFO
#endif

#endif
