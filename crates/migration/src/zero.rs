//! Detection of pages that are all zero.

use ebb_abi::PAGE_SIZE_BYTES;

const PAGE: usize = PAGE_SIZE_BYTES as usize;

/// Bytes compared between two branches. The compiler vectorizes a step.
const STEP: usize = 256;

/// Whether all bytes of a page are zero.
///
/// Most pages in use differ in their first or last byte; the rest is combined in steps, without a
/// branch per word.
pub fn is_zero_page(page: &[u8]) -> bool {
    page.first().is_none_or(|first| *first == 0)
        && page.last().is_none_or(|last| *last == 0)
        && page.chunks(STEP).all(|step| {
            let (words, rest) = step.as_chunks::<8>();
            words.iter().fold(0, |all, word| all | u64::from_ne_bytes(*word)) == 0
                && rest.iter().all(|byte| *byte == 0)
        })
}

/// Returns the length of the first run of pages in `pages` that are all zero or all not zero, and
/// its kind.
pub(crate) fn first_run(pages: &[u8]) -> (usize, PageContent) {
    let mut chunks = pages
        .chunks_exact(PAGE)
        .map(|page| if is_zero_page(page) { PageContent::Zero } else { PageContent::Data });
    let Some(first) = chunks.next() else { return (0, PageContent::Data) };
    (1 + chunks.take_while(|content| *content == first).count(), first)
}

/// Content of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PageContent {
    Zero,
    Data,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_bit_anywhere_is_found() {
        let mut page = vec![0; PAGE];
        assert!(is_zero_page(&page));
        for index in 0..PAGE {
            page[index] = 1 << (index % 8);
            assert!(!is_zero_page(&page), "byte {index}");
            page[index] = 0;
        }
    }

    #[test]
    fn runs_end_where_the_content_changes() {
        let mut pages = vec![0; 5 * PAGE];
        pages[2 * PAGE + 17] = 1;
        pages[4 * PAGE - 1] = 1;
        assert_eq!(first_run(&pages), (2, PageContent::Zero));
        assert_eq!(first_run(&pages[2 * PAGE..]), (2, PageContent::Data));
        assert_eq!(first_run(&pages[4 * PAGE..]), (1, PageContent::Zero));
        assert_eq!(first_run(&[]).0, 0);
    }
}
