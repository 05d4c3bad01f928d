"""The packing algorithms as simple loops: bins in the order they were opened, items in the order they were added."""


def in_fullest(order, lengths, capacity, max_items):
    """Put each item into the fullest bin with room; among equally full bins, the one that changed last."""
    bins, room, changed = [], [], []
    for step, item in enumerate(order):
        fitting = [b for b in range(len(bins)) if room[b] >= lengths[item] and len(bins[b]) < max_items]
        if fitting:
            chosen = min(fitting, key=lambda b: (room[b], -changed[b]))
        else:
            chosen = len(bins)
            bins.append([])
            room.append(capacity)
            changed.append(step)
        bins[chosen].append(item)
        room[chosen] -= lengths[item]
        changed[chosen] = step
    return bins


def best_fit_decreasing(lengths, capacity, max_items):
    order = sorted(range(len(lengths)), key=lambda item: -lengths[item])
    return in_fullest(order, lengths, capacity, max_items)


def best_fit(lengths, capacity, max_items):
    return in_fullest(range(len(lengths)), lengths, capacity, max_items)


def next_fit(lengths, capacity, max_items):
    bins = []
    for item, length in enumerate(lengths):
        if bins and sum(lengths[i] for i in bins[-1]) + length <= capacity and len(bins[-1]) < max_items:
            bins[-1].append(item)
        else:
            bins.append([item])
    return bins


def windowed(lengths, capacity, max_items, window=1024, threshold=0.95, max_carries=2):
    done, carried = [], {}  # carried: item -> number of carries
    for start in range(0, len(lengths), window):
        stop = min(start + window, len(lengths))
        pool = carried | dict.fromkeys(range(start, stop), 0)
        overdue = {item for item in pool if pool[item] == max_carries}
        order = sorted(pool, key=lambda item: (item not in overdue, -lengths[item], item))
        carried = {}
        for items in sorted(map(sorted, in_fullest(order, lengths, capacity, max_items))):
            filled = sum(lengths[item] for item in items) / capacity
            if filled >= threshold or len(items) == max_items or overdue & set(items) or stop == len(lengths):
                done.append(items)
            else:
                carried |= {item: pool[item] + 1 for item in items}
    return done


def fewest_bins(lengths, capacity, max_items):
    """The smallest number of bins, by trying all assignments; for a few documents."""

    def search(position, bins, best):
        if len(bins) >= best:
            return best
        if position == len(order):
            return len(bins)
        for index, (room, held) in enumerate(bins):
            if room >= order[position] and held < max_items:
                changed = [*bins[:index], (room - order[position], held + 1), *bins[index + 1 :]]
                best = search(position + 1, changed, best)
        return search(position + 1, [*bins, (capacity - order[position], 1)], best)

    order = sorted(lengths, reverse=True)
    return search(0, [], len(lengths) + 1)
