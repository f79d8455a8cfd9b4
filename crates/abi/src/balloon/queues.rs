//! Which virtqueue means what.
//!
//! The specification gives each queue a fixed number (virtio 1.3 section 5.5.2). Drivers and
//! devices have not kept to it: Linux numbers the queues of the *negotiated* features densely
//! (`vm_find_vqs` in drivers/virtio/virtio_mmio.c skips the names that are NULL without using up an
//! index), QEMU and Firecracker those of the *offered* features. A driver written for either, or
//! for the specification, makes queues ready under its own numbers.
//!
//! All three schemes keep the order of the queues. So the set of indexes that the driver made ready
//! tells which queue is which, whatever the scheme: the k-th ready queue is the k-th queue of the
//! negotiated features. Only if the driver made fewer or more queues ready than it negotiated do
//! the schemes have to be tried one by one.

use super::features::{Feature, Features};

/// Queues that the specification defines.
pub const STANDARD_QUEUES: usize = 5;

/// Queues of a balloon with the extension, which has one more.
pub const MAX_QUEUES: usize = STANDARD_QUEUES + 1;

/// The meaning of a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum QueueKind {
    /// Page frame numbers that the driver gives to the balloon.
    Inflate = 0,
    /// Page frame numbers that the driver takes back.
    Deflate = 1,
    /// The one statistics buffer.
    Statistics = 2,
    /// Free page hinting.
    FreePageHint = 3,
    /// Page reporting.
    Reporting = 4,
    /// Requests of the host and the driver's answers (docs/extension.md).
    HostRequest = 5,
}

impl QueueKind {
    /// All kinds in the order of every numbering scheme.
    pub const ALL: [Self; MAX_QUEUES] = [
        Self::Inflate,
        Self::Deflate,
        Self::Statistics,
        Self::FreePageHint,
        Self::Reporting,
        Self::HostRequest,
    ];

    /// The feature that the queue depends on; `None` if it always exists.
    pub const fn feature(self) -> Option<Feature> {
        match self {
            Self::Inflate | Self::Deflate => None,
            Self::Statistics => Some(Feature::StatisticsQueue),
            Self::FreePageHint => Some(Feature::FreePageHint),
            Self::Reporting => Some(Feature::PageReporting),
            Self::HostRequest => Some(Feature::HostRequest),
        }
    }

    /// The queue's number in the specification; that of the host request queue follows them.
    pub const fn specification_index(self) -> usize {
        self as usize
    }

    /// Name for people and for metrics.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Inflate => "inflate",
            Self::Deflate => "deflate",
            Self::Statistics => "statistics",
            Self::FreePageHint => "hinting",
            Self::Reporting => "reporting",
            Self::HostRequest => "host_request",
        }
    }
}

/// The queues that exist with some features, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueSet(u8);

impl QueueSet {
    /// The queues that exist when `features` are negotiated (or offered).
    pub fn of(features: Features) -> Self {
        let exists =
            |kind: &QueueKind| kind.feature().is_none_or(|feature| features.contains(feature));
        Self(QueueKind::ALL.into_iter().filter(exists).fold(0, |set, kind| set | 1 << kind as u8))
    }

    /// Whether the queue exists.
    pub const fn contains(self, kind: QueueKind) -> bool {
        self.0 & (1 << kind as u8) != 0
    }

    /// The queues in order.
    pub fn iter(self) -> impl Iterator<Item = QueueKind> {
        QueueKind::ALL.into_iter().filter(move |kind| self.contains(*kind))
    }

    /// How many queues exist.
    pub const fn count(self) -> usize {
        self.0.count_ones() as usize
    }

    /// How many queues exist before `kind`.
    const fn rank(self, kind: QueueKind) -> usize {
        (self.0 & ((1 << kind as u8) - 1)).count_ones() as usize
    }
}

/// A way to number the queues.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Numbering {
    /// Fixed numbers, with gaps (virtio 1.3 section 5.5.2).
    Specification,
    /// Without gaps over the negotiated features (Linux).
    DenseNegotiated,
    /// Without gaps over the offered features (QEMU, Firecracker).
    DenseOffered,
}

impl Numbering {
    /// All schemes; first the one that most drivers use.
    pub const ALL: [Self; 3] = [Self::DenseNegotiated, Self::Specification, Self::DenseOffered];

    /// Index of `kind` under this scheme.
    pub const fn index(self, kind: QueueKind, offered: QueueSet, negotiated: QueueSet) -> usize {
        match self {
            Self::Specification => kind.specification_index(),
            Self::DenseNegotiated => negotiated.rank(kind),
            Self::DenseOffered => offered.rank(kind),
        }
    }
}

/// Transport indexes of queues, 0 to 31, for example those that the driver made ready.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QueueIndexes(u32);

impl QueueIndexes {
    /// No index.
    pub const NONE: Self = Self(0);

    /// The set with `index` added; indexes above 31, which no balloon has, are left out.
    #[must_use]
    pub const fn with(self, index: usize) -> Self {
        if index < 32 { Self(self.0 | 1 << index) } else { self }
    }

    /// Whether the set has `index`.
    pub const fn contains(self, index: usize) -> bool {
        index < 32 && self.0 & (1 << index) != 0
    }

    /// How many indexes the set has.
    pub const fn count(self) -> usize {
        self.0.count_ones() as usize
    }

    /// The indexes in ascending order.
    pub fn iter(self) -> impl Iterator<Item = usize> {
        (0..32).filter(move |index| self.contains(*index))
    }
}

impl FromIterator<usize> for QueueIndexes {
    fn from_iter<I: IntoIterator<Item = usize>>(indexes: I) -> Self {
        indexes.into_iter().fold(Self::NONE, Self::with)
    }
}

/// Why the queues could not be told apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueMapError {
    /// The queue that every balloon needs and that the driver did not make ready.
    pub missing: QueueKind,
    /// What the driver made ready.
    pub ready: QueueIndexes,
}

impl core::fmt::Display for QueueMapError {
    fn fmt(&self, formatter: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(
            formatter,
            "the driver made {} queue(s) ready and no {} queue is among them",
            self.ready.count(),
            self.missing.name()
        )
    }
}

impl core::error::Error for QueueMapError {}

/// Meaning of each transport index, resolved once, at activation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QueueMap {
    index_of: [Option<u8>; MAX_QUEUES],
}

impl QueueMap {
    /// Finds out which queue is which.
    ///
    /// `offered` and `negotiated` are feature words, `ready` the transport indexes that the driver
    /// made ready. A queue that was negotiated and not made ready is absent from the map; one that
    /// was made ready and not negotiated has no meaning.
    ///
    /// # Errors
    /// [`QueueMapError`] when the inflate or the deflate queue is not ready: these two exist always
    /// and are 0 and 1 in every scheme.
    pub fn resolve(
        offered: Features,
        negotiated: Features,
        ready: QueueIndexes,
    ) -> Result<Self, QueueMapError> {
        for kind in [QueueKind::Inflate, QueueKind::Deflate] {
            if !ready.contains(kind.specification_index()) {
                return Err(QueueMapError { missing: kind, ready });
            }
        }
        let offered = QueueSet::of(offered);
        let negotiated = QueueSet::of(negotiated);
        if ready.count() == negotiated.count() {
            let mut map = Self::default();
            for (kind, index) in negotiated.iter().zip(ready.iter()) {
                map.index_of[kind as usize] = Some(index as u8);
            }
            return Ok(map);
        }
        Ok(Self::resolve_by_scheme(offered, negotiated, ready))
    }

    /// For drivers whose ready queues are not as many as the negotiated ones: the scheme that
    /// explains most of the ready queues; among equals the most common one.
    fn resolve_by_scheme(offered: QueueSet, negotiated: QueueSet, ready: QueueIndexes) -> Self {
        let mut best = Self::default();
        for numbering in Numbering::ALL {
            let mut map = Self::default();
            for kind in negotiated.iter() {
                let index = numbering.index(kind, offered, negotiated);
                if ready.contains(index) {
                    map.index_of[kind as usize] = Some(index as u8);
                }
            }
            if map.count() > best.count() {
                best = map;
            }
        }
        best
    }

    /// Meaning of the queue with this transport index.
    pub fn kind(&self, index: usize) -> Option<QueueKind> {
        QueueKind::ALL.into_iter().find(|kind| self.index(*kind) == Some(index))
    }

    /// Transport index of the queue with this meaning.
    pub fn index(&self, kind: QueueKind) -> Option<usize> {
        self.index_of[kind as usize].map(usize::from)
    }

    /// How many queues have a meaning.
    pub fn count(&self) -> usize {
        self.index_of.iter().flatten().count()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::vec::Vec;

    /// Every pair of offered features and a subset of them that the driver accepted.
    fn offers_and_answers() -> impl Iterator<Item = (Features, Features)> {
        // Bits 6 to 8 stand for the extension's.
        let features = |bits: u64| Features(bits & 0x3f | (bits >> 6) << 50);
        (0..512_u64).flat_map(move |offered| {
            // Each subset once: counting downwards within the mask.
            core::iter::successors(Some(offered), move |subset| {
                (*subset != 0).then(|| (subset - 1) & offered)
            })
            .map(move |negotiated| (features(offered), features(negotiated)))
        })
    }

    #[test]
    fn every_scheme_is_understood_for_every_subset_of_features() {
        for (offered, negotiated) in offers_and_answers() {
            let (offered_set, negotiated_set) = (QueueSet::of(offered), QueueSet::of(negotiated));
            for numbering in Numbering::ALL {
                let index = |kind| numbering.index(kind, offered_set, negotiated_set);
                let ready: QueueIndexes = negotiated_set.iter().map(index).collect();
                let map =
                    QueueMap::resolve(offered, negotiated, ready).expect("all queues are ready");
                assert_eq!(map.count(), negotiated_set.count());
                for kind in QueueKind::ALL {
                    let expected = negotiated_set.contains(kind).then(|| index(kind));
                    assert_eq!(map.index(kind), expected, "{numbering:?} {offered} {negotiated}");
                    if let Some(expected) = expected {
                        assert_eq!(map.kind(expected), Some(kind));
                    }
                }
            }
        }
    }

    #[test]
    fn the_schemes_differ_as_soon_as_an_earlier_queue_is_declined() {
        let indexes = |kind: QueueKind, offered, negotiated| -> Vec<_> {
            let (offered, negotiated) = (QueueSet::of(offered), QueueSet::of(negotiated));
            Numbering::ALL
                .into_iter()
                .map(|numbering| numbering.index(kind, offered, negotiated))
                .collect()
        };
        let reporting = Features::from(Feature::PageReporting);
        assert_eq!(indexes(QueueKind::Reporting, Features::ALL_BALLOON, reporting), [2, 4, 4]);
        let offered = Features::ALL_WITH_EXTENSION.without(Feature::FreePageHint);
        assert_eq!(
            indexes(QueueKind::HostRequest, offered, reporting.with(Feature::HostRequest)),
            [3, 5, 4]
        );
        // The standard's queues stay where they are.
        assert_eq!(
            indexes(QueueKind::Reporting, Features::ALL_WITH_EXTENSION, reporting),
            [2, 4, 4]
        );
    }

    #[test]
    fn a_negotiated_queue_that_is_not_ready_is_absent() {
        for numbering in Numbering::ALL {
            let features = Features::ALL_WITH_EXTENSION;
            let all = QueueSet::of(features);
            for missing in QueueKind::ALL.into_iter().skip(2) {
                let ready = all
                    .iter()
                    .filter(|kind| *kind != missing)
                    .map(|kind| numbering.index(kind, all, all))
                    .collect();
                let map = QueueMap::resolve(features, features, ready)
                    .expect("inflate and deflate are ready");
                assert_eq!(map.index(missing), None);
                assert_eq!(map.count(), MAX_QUEUES - 1);
            }
        }
    }

    #[test]
    fn a_ready_queue_that_was_not_negotiated_has_no_meaning() {
        let ready = (0..MAX_QUEUES).collect();
        let map =
            QueueMap::resolve(Features::ALL_BALLOON, Features::NONE, ready).expect("enough queues");
        assert_eq!(map.count(), 2);
        assert_eq!((2..32).find_map(|index| map.kind(index)), None);
    }

    #[test]
    fn without_inflate_or_deflate_there_is_no_balloon() {
        let error =
            QueueMap::resolve(Features::ALL_BALLOON, Features::NONE, QueueIndexes::NONE.with(0));
        assert_eq!(error.map_err(|error| error.missing), Err(QueueKind::Deflate));
        let error = QueueMap::resolve(Features::ALL_BALLOON, Features::NONE, QueueIndexes::NONE);
        assert_eq!(error.map_err(|error| error.missing), Err(QueueKind::Inflate));
    }

    #[test]
    fn indexes_out_of_reach_are_ignored() {
        let indexes: QueueIndexes = [0, 31, 32, usize::MAX].into_iter().collect();
        assert_eq!(indexes.iter().collect::<Vec<_>>(), [0, 31]);
        assert!(!indexes.contains(32));
    }
}
