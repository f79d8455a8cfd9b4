//! Statistics, with the names of Linux's KSM (Documentation/admin-guide/mm/ksm.rst).

use serde::{Deserialize, Serialize};

/// Statistics of merging. All pages are of 4096 bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Statistics {
    /// Stable pages in use.
    pub pages_shared: u64,
    /// Pages that share them, beyond the first of each: the saved ones.
    pub pages_sharing: u64,
    /// Pages without a duplicate, unchanged since they were hashed.
    pub pages_unshared: u64,
    /// Pages that changed too recently to be hashed, or, in a huge page, since they were hashed.
    pub pages_volatile: u64,
    /// Pages scanned in all passes.
    pub pages_scanned: u64,
    /// Clean pages that were not hashed yet because they had changed often before.
    pub pages_skipped: u64,
    /// Passes over all memory.
    pub full_scans: u64,
    /// Pages of zeros that were discarded and have not been written to since.
    pub ksm_zero_pages: u64,
    /// Bytes saved less bytes of metadata.
    pub general_profit: i64,
    /// Contents with several stable pages, because one has the maximum number of sharers.
    pub stable_node_chains: u64,
    /// Stable pages with such contents.
    pub stable_node_dups: u64,
    /// Pages that were duplicates when they were hashed, but could not be replaced; they are
    /// retried.
    pub pages_refused: u64,
    /// Pages replaced by a stable page.
    pub merged_pages: u64,
    /// Merged pages whose stable page is on another node than the pages were, when last looked up.
    /// Where nodes are kept apart, their shares are moved to stable pages on the right node.
    pub remote_merged_pages: u64,
    /// Shares that were moved to another stable page, because the former one was on another node or
    /// of a lost store.
    pub moved_pages: u64,
    /// Memory of the tables, in bytes.
    pub metadata_bytes: u64,
    /// Pages that were read and hashed.
    pub hashed_pages: u64,
    /// Scans that found a page unchanged, or still merged.
    pub clean_pages: u64,
    /// Scans that found that a page may have been written to.
    pub written_pages: u64,
    /// Scans that found a page to be part of a huge page: writes to these are not tracked.
    pub untracked_pages: u64,
    /// Merged pages that were written to.
    pub broken_pages: u64,
    /// Of these, pages that their owner has made anonymous again, so that they can be merged again.
    pub brought_back_pages: u64,
    /// Of these, pages that were merged again.
    pub remerged_pages: u64,
    /// Huge pages that were split because enough of their pages were duplicates.
    pub huge_pages_split: u64,
    /// Of these, huge pages of which fewer than `huge_min_duplicates` pages were merged then.
    pub huge_pages_split_in_vain: u64,
    /// Huge pages made of small pages of which none was merged any more.
    pub huge_pages_collapsed: u64,
    /// Attempts to replace a page, by outcome: done.
    pub replaced_done: u64,
    /// The content had changed since it was hashed (or hashes collide).
    pub replaced_different: u64,
    /// The page was pinned.
    pub replaced_busy: u64,
    /// Too few mappings were left for a run of its length.
    pub replaced_no_mappings: u64,
    /// The page to be replaced no longer exists.
    pub replaced_gone: u64,
    /// Failures of the store of stable pages.
    pub store_errors: u64,
    /// Failures of scanning, reading or replacing memory.
    pub memory_errors: u64,
}
