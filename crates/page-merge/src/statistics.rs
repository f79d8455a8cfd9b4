//! Statistics, with the names that Linux's KSM has for them (Documentation/admin-guide/mm/ksm.rst).

use serde::{Deserialize, Serialize};

/// What merging has found and done. All pages are of 4096 bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Statistics {
    /// Stable pages in use.
    pub pages_shared: u64,
    /// Pages that share them, beyond the first of each: what is saved.
    pub pages_sharing: u64,
    /// Pages without a duplicate, unchanged since they were hashed.
    pub pages_unshared: u64,
    /// Pages that changed too lately to be hashed.
    pub pages_volatile: u64,
    /// Pages looked at, all passes together.
    pub pages_scanned: u64,
    /// Clean pages that were not hashed yet because they had changed often before.
    pub pages_skipped: u64,
    /// Passes over all memory.
    pub full_scans: u64,
    /// Pages of zeros that were taken away and have not been written to since.
    pub ksm_zero_pages: u64,
    /// Bytes saved less bytes of metadata.
    pub general_profit: i64,
    /// Contents with several stable pages, because one has as many sharers as it may have.
    pub stable_node_chains: u64,
    /// Stable pages with such contents.
    pub stable_node_dups: u64,
    /// Pages that were duplicates when they were hashed, but could not be replaced; they are tried
    /// again.
    pub pages_refused: u64,
    /// Pages in whose place a stable page is.
    pub merged_pages: u64,
    /// Merged pages whose stable page was on another node than they had been when last looked up.
    /// Where nodes are kept apart such pages are given pages of their own at once.
    pub remote_merged_pages: u64,
    /// Pages that were unmerged because their stable page had moved to another node.
    pub moved_pages: u64,
    /// Memory that tables take up here.
    pub metadata_bytes: u64,
    /// Pages that were read and hashed.
    pub hashed_pages: u64,
    /// Looks that found a page unchanged, or still merged.
    pub clean_pages: u64,
    /// Looks that found that a page may have been written to.
    pub written_pages: u64,
    /// Merged pages that were written to.
    pub broken_pages: u64,
    /// Of these, pages that their owner has made pages like others again, so that they can be
    /// merged again.
    pub brought_back_pages: u64,
    /// Of these, pages that were merged again.
    pub remerged_pages: u64,
    /// Huge pages that were split because enough of them was duplicate.
    pub huge_pages_split: u64,
    /// Attempts to replace a page, by outcome: done.
    pub replaced_done: u64,
    /// The content had changed since it was hashed (or hashes collide).
    pub replaced_different: u64,
    /// The page was pinned.
    pub replaced_busy: u64,
    /// Too few mappings left for so short a run.
    pub replaced_no_mappings: u64,
    /// There was nothing to be replaced any more.
    pub replaced_gone: u64,
    /// Times that the store of stable pages failed.
    pub store_errors: u64,
    /// Times that memory could not be looked at, read or replaced.
    pub memory_errors: u64,
}
