/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Differences between the kernels that the module is built for (6.1, 6.12).
 */
#ifndef EBB_BALLOON_COMPAT_H
#define EBB_BALLOON_COMPAT_H

#include <linux/mmzone.h>
#include <linux/page_reporting.h>
#include <linux/version.h>

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

/* Names and callbacks of virtqueues are in one structure. */
#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 11, 0)
#define EBB_VIRTQUEUE_INFO
#endif

#endif
